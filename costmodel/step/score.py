"""The streams of a device while they play a step.

One stream has all computation, others send, each in order of issue. What is played is a score of
operations, each with a number and with seconds.

    COMPUTE   computes for so many seconds, longer while something is sent
    SEND      sends on the stream of that number behind the computation so far
    WAIT      lets computation wait for a transfer, so many transfers before the next one
    PHASE     computation counts to the phase of that number from here on
    MARK      begins what is repeated
    REPEAT    counts what was played since the mark so many times more, without playing it
    FINISH    waits for all that is under way, in the order of issue

Streams that send over one link divide it: links are in groups, of which each transfer under way
goes on at

    rate = 1 / max over its links of max(1, sum of the shares of what is sent there)

A share is the part of its time alone for which a transfer keeps a link busy: 1 on one link, where
this is processor sharing. A transfer that is issued later makes those under way end later, so a
known end holds until the next one is issued.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from .reasons import Reason

ALONE = -1
"""The group of a stream whose links no other stream sends over."""
SAME = 1e-12
"""Remaining work of a transfer that counts as none (a share)."""
REMEMBERED = 64
"""The number of remembered transfers above which finished ones are forgotten."""
PHASES = 3
"""The number of phases."""


class Op(IntEnum):
    """The operations of a score."""

    COMPUTE = 0
    SEND = 1
    WAIT = 2
    PHASE = 3
    MARK = 4
    REPEAT = 5
    FINISH = 6


class Entry(NamedTuple):
    """An operation of the score; `reason`: why computation waits for a transfer, if it does.

    `issued`: seconds for which the host issues it.
    """

    op: Op
    number: int = 0
    seconds: float = 0.0
    name: str = ""
    kind: str = ""
    reason: Reason = Reason.VALUES
    issued: float = 0.0


class Links(NamedTuple):
    """The links of streams, by their numbers.

    `groups`: of each stream, or `ALONE`. `shares`: the links that it sends over, and its share.
    """

    groups: Sequence[int]
    shares: Sequence[Mapping[str, float]]


class Waited(NamedTuple):
    """Computation stood still for a transfer; `late`: seconds that are due to other transfers."""

    sent: int
    seconds: float
    late: float


class _Sent:
    """A transfer with its start and end as now known; `left`: seconds of its work alone."""

    __slots__ = ("after", "end", "index", "left", "start", "stream", "work")

    def __init__(self, start: float, seconds: float, stream: int, index: int) -> None:
        self.start = start
        self.end = start + seconds
        self.stream = stream
        self.index = index
        self.after = start
        self.work = self.end - start
        self.left = self.work

    def shift(self, seconds: float) -> None:
        self.start += seconds
        self.end += seconds
        self.after += seconds


class _SharedLinks:
    """The transfers of each stream that are not over at `time`, the first of which is under way."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.time = 0.0
        self.queues: dict[int, list[_Sent]] = {}

    def waiting(self) -> Iterator[_Sent]:
        """All unfinished transfers, stream by stream."""
        for queue in self.queues.values():
            yield from queue

    def send(self, sent: _Sent, now: float) -> None:
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

    def _advance(self, until: float) -> None:
        """Let the transfers go on until then."""
        while self.time < until and any(self.queues.values()):
            sending = [queue[0] for queue in self.queues.values() if queue]
            slower = self._slower(sending)
            ends = [one.left * slow for one, slow in zip(sending, slower, strict=True)]
            # Up to the next event: a transfer ends, or the time is over.
            step = min(*ends, until - self.time)
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

    def _slower(self, sending: Sequence[_Sent]) -> list[float]:
        """How many times longer each transfer takes beside the others."""
        loads: dict[str, float] = {}
        uses = [self.links.shares[one.stream] for one in sending]
        for own in uses:
            for link, share in own.items():
                loads[link] = loads.get(link, 0.0) + share
        return [max(1.0, *(loads[link] for link in own)) for own in uses]


class Player:
    """Plays operations one by one; computation takes `slowdown` times as long beside transfers.

    `now`: the end of the computation issued so far, or of its wait. `issued`: the host's clock, for
    which computation waits. `blocking`: the host waits for every computation. `slowed`: seconds by
    which transfers slowed computation down. `spent`: its seconds by phase. `starts`, `ends`: of
    each computation and transfer, by the index of its operation. `waited`: by the index of an
    operation, the waits that it began, if any.
    """

    def __init__(self, links: Links, slowdown: float, *, blocking: bool = False) -> None:
        self.slowdown = slowdown
        self.blocking = blocking
        self.issued = 0.0
        self.group = links.groups
        self.shared = {group: _SharedLinks(links) for group in links.groups if group != ALONE}
        self.free = [0.0] * len(links.groups)
        self.now = 0.0
        self.slowed = 0.0
        self.spent = [0.0] * PHASES
        self.phase = 0
        self.sent: list[_Sent] = []
        self.under_way: list[_Sent] = []
        self.mark = (0.0, 0.0, 0.0, self.spent)
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.waited: dict[int, list[Waited]] = {}

    def play(self, entries: Sequence[Entry]) -> None:
        """Play a score."""
        self.starts = [0.0] * len(entries)
        self.ends = [0.0] * len(entries)
        # In the order of the numbers of operations.
        does = (
            self.compute,
            self.send,
            self.wait,
            self.turn_to,
            self.set_mark,
            self.repeat,
            self.finish,
        )
        for index, entry in enumerate(entries):
            does[entry.op](index, entry)

    def turn_to(self, _: int, entry: Entry) -> None:
        self.phase = entry.number

    def set_mark(self, _: int, __: Entry) -> None:
        self.mark = self.now, self.issued, self.slowed, list(self.spent)

    def compute(self, index: int, entry: Entry) -> None:
        seconds = entry.seconds
        if entry.issued:
            self.issued = (self.now if self.blocking else self.issued) + entry.issued
            # Waiting for the host counts as computation.
            self.spent[self.phase] += max(self.issued - self.now, 0.0)
            self.now = max(self.issued, self.now)
        start = self.now
        slows = bool(self.under_way) and self.slowdown != 1.0
        if slows:
            self.under_way.sort(key=lambda sent: sent.start)
            self.now = self._slowed(start, seconds)
            self.under_way = [sent for sent in self.under_way if sent.end > start]
        else:
            self.now = start + seconds
        self.spent[self.phase] += seconds
        self.slowed += self.now - start - seconds
        self._note(index, start, self.now)

    def _slowed(self, start: float, seconds: float) -> float:
        """Return the end of `seconds` of work from `start`.

        While something is sent, the work runs at 1 / slowdown of its speed.
        """
        for sent in self.under_way:
            # Full speed up to the start of a transfer, slowed down until its end.
            if sent.start - start >= seconds:
                break
            if sent.start > start:
                seconds -= sent.start - start
                start = sent.start
            if sent.end > start:
                done = (sent.end - start) / self.slowdown
                if done >= seconds:
                    return start + seconds * self.slowdown
                seconds -= done
                start = sent.end
        return start + seconds

    def send(self, index: int, entry: Entry) -> None:
        stream = entry.number
        start = max(self.now, self.free[stream])
        sent = _Sent(start, entry.seconds, stream, index)
        sent.after = self.now
        self.sent.append(sent)
        self.free[stream] = sent.end
        self._note(index, start, sent.end)
        if self.group[stream] != ALONE:
            link = self.shared[self.group[stream]]
            link.send(sent, self.now)
            for one in link.waiting():
                self.free[one.stream] = one.end
                self._note(one.index, one.start, one.end)
        self.under_way.append(sent)
        if len(self.under_way) > REMEMBERED:
            self.under_way = [one for one in self.under_way if one.end > self.now]

    def wait(self, index: int, entry: Entry) -> None:
        if not 0 < entry.number <= len(self.sent):
            raise ValueError("a transfer is waited for that was not sent")
        self._wait(self.sent[-entry.number], index)

    def _wait(self, sent: _Sent, index: int) -> None:
        seconds = sent.end - self.now
        # What is over by now is not waited for.
        if seconds > 0:
            # Alone on its stream and links, it had taken its own seconds from the time of issue.
            late = min(seconds, sent.end - sent.after - sent.work)
            self.waited.setdefault(index, []).append(Waited(sent.index, seconds, late))
            self.now = sent.end

    def repeat(self, _: int, entry: Entry) -> None:
        times = entry.number
        now, issued, slowed, spent = self.mark
        # What is under way ends later by as much, and nothing else is issued meanwhile.
        seconds = times * (self.now - now)
        self.now += seconds
        self.issued += times * (self.issued - issued)
        self.free = [end + seconds for end in self.free]
        for sent in self.under_way:
            # Those of a shared link are shifted by the link itself, once.
            if self.group[sent.stream] == ALONE:
                sent.shift(seconds)
        for link in self.shared.values():
            link.time += seconds
            for one in link.waiting():
                one.shift(seconds)
        self.slowed += times * (self.slowed - slowed)
        for phase, before in enumerate(spent):
            self.spent[phase] += times * (self.spent[phase] - before)

    def finish(self, index: int, _: Entry) -> None:
        for sent in self.under_way:
            self._wait(sent, index)

    def _note(self, index: int, start: float, end: float) -> None:
        self.starts[index] = start
        self.ends[index] = end
