"""The stops of a search that its user names: a gap that is near enough, and a time that is over."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from .effort import EFFORT


class TimeIsOver(KeyboardInterrupt):
    """The seconds of a search are over: as after Ctrl-C, its best plan so far is the plan."""


class Clock:
    """Looks whether the `seconds` of a search are over (None: they never are)."""

    def __init__(self, seconds: float | None = None) -> None:
        # Without a limit no clock is read, so that a search depends on its request alone.
        self.end = None if seconds is None else monotonic() + seconds

    @property
    def left(self) -> float | None:
        """The seconds that are left."""
        return None if self.end is None else max(self.end - monotonic(), 0.0)

    def look(self) -> None:
        """Raise `TimeIsOver` where no seconds are left."""
        if self.left == 0.0:
            raise TimeIsOver


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """How near a search comes to its bound; `gap`: the share that its user asked for (None: none).

    Who asks for a gap waits for it: the numbers of `EFFORT` that end a search early do not count.
    """

    gap: float | None = None

    @property
    def is_patient(self) -> bool:
        """Whether a search goes on until nothing is left to look at."""
        return self.gap is not None

    def enough(self, incumbent: float) -> float:
        """Return the bound, in seconds, at which an incumbent is near enough."""
        if self.gap is not None:
            return incumbent / (1 + self.gap)
        return (1 - EFFORT.certified) * incumbent
