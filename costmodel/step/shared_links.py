"""Links that several streams send over, each in order of issue, and share fairly.

    rate of a transfer = 1 / max over its links of max(1, sum of the shares of what is sent there)

A share is the part of its time alone for which a transfer keeps a link busy: 1 on one link, where
this is processor sharing. A transfer that is issued later makes those under way end later, so a
known end holds until the next one is issued.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from .reasons import Reason

SAME = 1e-12
"""Remaining work of a transfer that counts as none (a share)."""


class Sent:
    """A transfer with its start and end as now known.

    `stream`: where it is sent. `event`: its index among the events (-1: none). `reason`: why
    computation waits for it, if it does.
    """

    __slots__ = ("after", "end", "event", "left", "reason", "start", "stream", "work")

    def __init__(self, start: float, end: float, stream: str = "", event: int = -1) -> None:
        self.start = start
        self.end = end
        self.stream = stream
        self.event = event
        self.reason = Reason.VALUES
        self.after = start
        self.work = end - start
        self.left = self.work

    def shift(self, seconds: float) -> None:
        """Move the transfer `seconds` later."""
        self.start += seconds
        self.end += seconds
        self.after += seconds


class SharedLinks:
    """The transfers of each stream that are not over at `time`, the first of which is under way.

    `uses`: the shares of links that the transfers of each stream keep busy.
    """

    def __init__(self, uses: Mapping[str, Mapping[str, float]]) -> None:
        self.uses = uses
        self.time = 0.0
        self.queues: dict[str, list[Sent]] = {}

    def waiting(self) -> Iterator[Sent]:
        """All unfinished transfers, stream by stream."""
        for queue in self.queues.values():
            yield from queue

    def send(self, sent: Sent, now: float) -> None:
        """Add a transfer that is issued `now`, and update start and end of all unfinished ones."""
        self._advance(now)
        self.queues.setdefault(sent.stream, []).append(sent)
        # The links are played to the end to know starts and ends, and then put back to the present.
        snapshot = (
            self.time,
            {stream: list(queue) for stream, queue in self.queues.items()},
            [(one, one.left) for one in self.waiting()],
        )
        self._advance(math.inf)
        self.time, self.queues, lefts = snapshot
        for one, left in lefts:
            one.left = left

    def skip(self, seconds: float) -> None:
        """Let time pass in which nothing moves."""
        self.time += seconds
        for one in self.waiting():
            one.shift(seconds)

    def _advance(self, until: float) -> None:
        """Let the transfers go on until then."""
        while self.time < until and any(self.queues.values()):
            heads = [queue[0] for queue in self.queues.values() if queue]
            sending = [one for one in heads if one.after <= self.time]
            coming = min((one.after for one in heads if one.after > self.time), default=math.inf)
            if not sending:
                self.time = min(coming, until)
                continue
            slower = self._slower(sending)
            ends = [one.left * slow for one, slow in zip(sending, slower, strict=True)]
            # Up to the next event: a transfer ends, another begins, or the time is over.
            step = min(*ends, coming - self.time, until - self.time)
            for one, slow, end in zip(sending, slower, ends, strict=True):
                one.start = self.time if one.left == one.work else one.start
                one.left -= step / slow
                # Rounding may leave a little of a transfer that is over.
                if end == step or one.left <= SAME * one.work:
                    one.end = self.time + step
                    self.queues[one.stream].pop(0)
            self.time += step
        if until < math.inf:
            self.time = max(self.time, until)

    def _slower(self, sending: Sequence[Sent]) -> list[float]:
        """How many times longer each transfer takes beside the others."""
        loads: dict[str, float] = {}
        for one in sending:
            for link, share in self.uses[one.stream].items():
                loads[link] = loads.get(link, 0.0) + share
        return [max(1.0, *(loads[link] for link in self.uses[one.stream])) for one in sending]
