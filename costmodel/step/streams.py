"""Streams of a device: computation on one, communication on others, each in order of issue.

A stream does one thing at a time. Streams that send over one link divide it (`shared_links`), so
the known end of a transfer may move after its start. That is why a `Sent` is handed out instead of
a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .reasons import Reason
from .shared_links import Sent, SharedLinks

COMPUTE = "compute"
REMEMBERED = 64
"""The number of remembered transfers above which finished ones are forgotten."""


class Event(NamedTuple):
    """The work of a stream from `start` to `end`; `phase` is forward, backward or update."""

    name: str
    kind: str
    stream: str
    phase: str
    start: float
    end: float


class Work(NamedTuple):
    """A stretch of computation."""

    name: str
    kind: str
    seconds: float


class Wait(NamedTuple):
    """Computation that stood still for `sent`, `times` times as long as `seconds`.

    `phase`: of the computation. `late`: the part of the seconds that is due to other transfers,
    those before it on its stream and those beside it on its links.
    """

    sent: Sent
    reason: Reason
    phase: str
    seconds: float
    late: float
    times: int = 1


class Mark(NamedTuple):
    """The counts of a clock at a time."""

    now: float
    slowed: float
    spent: Mapping[str, float]
    sent: int
    waits: int


def _shared(uses: Mapping[str, Mapping[str, float]]) -> dict[str, SharedLinks]:
    """The links of each stream that shares one, together with all links that are shared there."""
    together: list[set[str]] = []
    for stream, links in uses.items():
        near = [some for some in together if any(links.keys() & uses[one] for one in some)]
        together = [some for some in together if some not in near] + [{stream}.union(*near)]
    shared = {}
    for some in together:
        # A link that only one stream sends over needs no sharing.
        if len(some) > 1:
            links_of = SharedLinks({stream: uses[stream] for stream in some})
            shared.update(dict.fromkeys(some, links_of))
    return shared


class Clock:
    """Streams and their history; one has all computation.

    `uses`: the links that a stream sends over, if any, and how busy it keeps each. `ends`: whether
    all passes are over. `slowed`: seconds by which transfers slowed the computation down.
    """

    def __init__(
        self, slowdown: float, uses: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        self.slowdown = slowdown
        self.shared = _shared(uses or {})
        self.events: list[Event] = []
        self.now = 0.0  # end of the computation issued so far, or of its wait
        self.phase = "forward"
        self.free: dict[str, float] = {}
        self.under_way: list[Sent] = []
        self.spent = {"forward": 0.0, "backward": 0.0, "update": 0.0}
        self.slowed = 0.0
        self.sent: list[float] = []
        self.waits: list[Wait] = []
        self.ends = False

    def compute(self, name: str, kind: str, seconds: float) -> float:
        """Compute for `seconds`, longer while something is sent, and return the end."""
        self.compute_all([Work(name, kind, seconds)])
        return self.now

    def compute_all(self, works: Iterable[Work]) -> None:
        """Compute one after the other, each longer while something is sent."""
        # Nothing is sent meanwhile, so that the transfers under way are looked up once.
        works = [work for work in works if work.seconds > 0]
        slows = bool(works and self.under_way) and self.slowdown != 1.0
        if slows:
            self.under_way.sort(key=lambda sent: sent.start)
        phase = self.phase
        start = now = self.now
        spent = self.spent[phase]
        slowed = self.slowed
        for name, kind, seconds in works:
            start = now
            now = self._slowed(start, seconds) if slows else start + seconds
            spent += seconds
            slowed += now - start - seconds
            self.events.append(Event(name, kind, COMPUTE, phase, start, now))
        self.now = now
        self.spent[phase] = spent
        self.slowed = slowed
        if slows:
            self.under_way = [sent for sent in self.under_way if sent.end > start]

    def send(self, name: str, kind: str, stream: str, seconds: float, after: float) -> Sent:
        """Communicate on `stream`, not before `after`."""
        # A group of one rank sends nothing, and keeps no stream busy.
        if seconds <= 0:
            return Sent(after, after)
        start = max(after, self.free.get(stream, 0.0))
        sent = Sent(start, start + seconds, stream, len(self.events))
        sent.after = after
        self.sent.append(seconds)
        self.events.append(Event(name, kind, stream, self.phase, start, sent.end))
        if stream in self.shared:
            self._share(sent)
        self.free[stream] = sent.end
        self.under_way.append(sent)
        if len(self.under_way) > REMEMBERED:
            self.under_way = [one for one in self.under_way if one.end > self.now]
        return sent

    def _share(self, sent: Sent) -> None:
        """Put a transfer on the link of its stream, and update the others there."""
        link = self.shared[sent.stream]
        # The link is played to the present only: what is issued later may still slow this down.
        link.send(sent, min(self.now, sent.after))
        for one in link.waiting():
            self.free[one.stream] = one.end
            self.events[one.event] = self.events[one.event]._replace(start=one.start, end=one.end)

    def wait(self, sent: Sent) -> None:
        """Let computation wait until a transfer is over."""
        seconds = sent.end - self.now
        # What is over by now is not waited for.
        if seconds > 0:
            # Alone on its stream and links, it had taken its own seconds from the time of issue.
            late = min(seconds, sent.end - sent.after - sent.work)
            reason = Reason.END if self.ends else sent.reason
            self.waits.append(Wait(sent, reason, self.phase, seconds, late))
            self.now = sent.end

    def mark(self) -> Mark:
        """Return the counts so far, for `repeat`."""
        return Mark(self.now, self.slowed, dict(self.spent), len(self.sent), len(self.waits))

    def repeat(self, mark: Mark, times: int) -> None:
        """Count what was played since `mark` so many times more, without playing it."""
        # What is under way ends later by as much, and nothing else is issued meanwhile.
        self.skip(times * (self.now - mark.now))
        self.slowed += times * (self.slowed - mark.slowed)
        for phase, before in mark.spent.items():
            self.spent[phase] += times * (self.spent[phase] - before)
        self.sent.append(times * math.fsum(self.sent[mark.sent :]))
        self.waits += [one._replace(times=times) for one in self.waits[mark.waits :]]

    def skip(self, seconds: float) -> None:
        """Skip time that is not played: all streams keep their state, `seconds` later."""
        self.now += seconds
        self.free = {stream: end + seconds for stream, end in self.free.items()}
        for sent in self.under_way:
            # Those of a shared link are shifted by the link itself, once.
            if sent.stream not in self.shared:
                sent.shift(seconds)
        for link in set(self.shared.values()):
            link.skip(seconds)

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
