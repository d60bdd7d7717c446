"""A clock for stated times, on which a step takes as long as its order makes it."""

from __future__ import annotations

from autopar.runtime.strict_backend import Clock


class VirtualClock(Clock):
    """A clock that only waits move on."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """The latest time until which the program has waited."""
        return self._now

    def wait_until(self, end: float) -> None:
        """Move the clock on to that time, unless it is past it."""
        # What was over before the program came for it costs nothing.
        self._now = max(self._now, end)
