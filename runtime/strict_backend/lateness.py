"""Ends of operations: late by a seeded delay, or as if a link took a stated time for each.

A stated time begins when the operation's ranks have issued it and their queues are free. It passes
on a clock: that of the machine, or a virtual one, which only waits and stated computation move on.
On a virtual clock a step takes as long as its order makes it, on however busy a machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LONGEST_DELAY = 0.002
"""Seconds by which an operation may end late."""

Hold = Callable[[str, tuple[int, ...]], float]
"""The seconds that an operation takes, by its kind ("all_gather") and the ranks of its group."""


class Clock:
    """The clock of the machine, which its ranks share."""

    def now(self) -> float:
        """The present time, in seconds."""
        return time.monotonic()

    def wait_until(self, end: float) -> None:
        """Let the program go on at that time."""
        time.sleep(max(end - self.now(), 0.0))


@dataclass(slots=True)
class _Held:
    """Stated times on a clock; `free`: when the queue of a group is free."""

    hold: Hold
    clock: Clock
    free: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Present:
    """The stated times of this process; without any, delays are seeded."""

    held: _Held | None = None


_PRESENT = _Present()


@contextmanager
def holding(hold: Hold, clock: Clock) -> Iterator[None]:
    """Inside, an operation is over when its stated time is over on the clock.

    No operation may be under way at the begin and at the end.
    """
    # Queues may have been busy on another clock before, so none is busy now.
    _PRESENT.held = _Held(hold, clock)
    try:
        yield
    finally:
        _PRESENT.held = None


def now() -> float:
    """The present time on the clock of stated times; 0 without any."""
    return 0.0 if _PRESENT.held is None else _PRESENT.held.clock.now()


def wait_until(end: float) -> None:
    """Let the program go on at that time, if times are stated."""
    if _PRESENT.held is not None:
        _PRESENT.held.clock.wait_until(end)


class Lateness:
    """The lateness of the operations of a group, whose delays are drawn with `seed`."""

    def __init__(self, name: str, ranks: tuple[int, ...], seed: str) -> None:
        self._name = name
        self._ranks = ranks
        self._delays = random.Random(seed)

    def start(self, issued: float) -> float:
        """The time at which the queue begins an operation that was issued then."""
        held = _PRESENT.held
        # Gloo is faster than the link: the operation before may be under way for longer.
        return issued if held is None else max(issued, held.free.get(self._name, issued))

    def end(self, kind: str, start: float) -> float:
        """The end of an operation that all ranks have begun at `start`, and that Gloo has run."""
        held = _PRESENT.held
        if held is None:
            # Few are late, or all would be late alike, and in their old order.
            if self._delays.random() < 0.25:
                time.sleep(self._delays.random() * LONGEST_DELAY)
            return start
        # Not the present time: threads that wake up late would make later operations later.
        held.free[self._name] = start + held.hold(kind.partition(" ")[0], self._ranks)
        return held.free[self._name]
