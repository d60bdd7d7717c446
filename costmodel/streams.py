"""Streams of a device: computation on one, communication on others, each of which does one thing at a time in the order of issue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

COMPUTE = "compute"


class Event(NamedTuple):
    """Something that a stream does from `start` to `end`; `phase` is forward, backward or update."""

    name: str
    kind: str
    stream: str
    phase: str
    start: float
    end: float


class Clock:
    """Streams with what they have done; all computation is on one."""

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self.events: list[Event] = []
        self.now = 0.0  # the end of the computation issued so far, or of what it waits for
        self.phase = "forward"
        self.free: dict[str, float] = {}
        self.under_way: list[tuple[float, float]] = []
        self.spent = {"forward": 0.0, "backward": 0.0, "update": 0.0}
        self.sent: list[float] = []

    def compute(self, name: str, kind: str, seconds: float) -> float:
        """Compute for `seconds`, longer while something is sent; its end."""
        if seconds > 0:
            start = self.now
            self.now = self._slowed(start, seconds)
            self.spent[self.phase] += seconds
            self.events.append(Event(name, kind, COMPUTE, self.phase, start, self.now))
        return self.now

    def send(self, name: str, kind: str, stream: str, seconds: float, after: float) -> float:
        """Communicate on `stream`, not before `after`; its end."""
        if seconds <= 0:
            return after
        start = max(after, self.free.get(stream, 0.0))
        end = self.free[stream] = start + seconds
        self.sent.append(seconds)
        if self.slowdown != 1.0:
            self.under_way.append((start, end))
        self.events.append(Event(name, kind, stream, self.phase, start, end))
        return end

    def wait(self, until: float) -> None:
        """Computation goes on no sooner than `until`."""
        self.now = max(self.now, until)

    def skip(self, seconds: float, spent: Mapping[str, float], sent: float) -> None:
        """Let time pass that is not played: all streams stand where they stood, `seconds` later."""
        self.now += seconds
        self.free = {stream: end + seconds for stream, end in self.free.items()}
        self.under_way = [(start + seconds, end + seconds) for start, end in self.under_way]
        for phase, more in spent.items():
            self.spent[phase] += more
        self.sent.append(sent)

    def _slowed(self, start: float, seconds: float) -> float:
        """The end of `seconds` of work from `start`, at 1 / slowdown of the speed while something is sent."""
        if not self.under_way:
            return start + seconds
        self.under_way = sorted(sent for sent in self.under_way if sent[1] > start)
        for sent, until in self.under_way:
            if sent - start >= seconds:
                break
            if sent > start:
                seconds -= sent - start
                start = sent
            if until > start:
                done = (until - start) / self.slowdown
                if done >= seconds:
                    return start + seconds * self.slowdown
                seconds -= done
                start = until
        return start + seconds
