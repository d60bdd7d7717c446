"""The limits of memory within which the tables of a pipeline's groups are solved, one by one.

The tables know the memory of all stages together only. Where no cut of their solution fits each
device, they are solved again within less.
"""

from __future__ import annotations

from collections.abc import Sequence

from .parts import Group, Part

TIGHTER = 0.85
"""The factor on the limit of the tables where a pipeline fits, and is to need less."""
SURE = 1.1
"""How many times the bytes by which the fullest device exceeds its memory are to be saved."""
TIGHTEST = 0.7
"""The least factor on the bytes that the last solution used, in one step."""


class TableLimits:
    """The limits within which the groups' tables are solved next.

    `allowed`: bytes of all stages of each group. `above`: the least limits under which no cut has
    fitted. `fitting`: limits under which a cut has fitted (None: none yet).
    """

    def __init__(self, groups: Sequence[Group], allowed: list[float]) -> None:
        self.groups = groups
        self.allowed = allowed
        self.above = allowed
        self.fitting: list[float] | None = None

    def loosen(self, least: float) -> bool:
        """Allow more, as the tables of a group need `least` bytes; whether less than was used."""
        self.allowed = _between(self.above, self.allowed)
        return any(least < most for most in self.above)

    def tighten(self, parts: Sequence[Part], excess: float) -> None:
        """Allow less: no cut of these parts fits, by `excess` bytes of the fullest device."""
        # A limit between the bytes used and those allowed would have the same solution.
        self.above = _used(parts, self.allowed)
        if self.fitting:
            self.allowed = _between(self.above, self.fitting)
        else:
            self.allowed = _tighter(self.groups, self.above, excess)

    def approach(self) -> None:
        """Allow a little more than what fitted, as the step may be shorter there."""
        self.fitting = self.allowed
        self.allowed = _between(self.above, self.allowed)


def _between(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [0.5 * (most + least) for most, least in zip(above, below, strict=True)]


def _used(parts: Sequence[Part], allowed: Sequence[float]) -> list[float]:
    """Return the bytes of its limit that each part's solution fills."""
    used = [part.tables.graph.memory_of(part.solution.choices) for part in parts]
    return [min(most, memory) for most, memory in zip(allowed, used, strict=True)]


def _tighter(groups: Sequence[Group], used: Sequence[float], excess: float) -> list[float]:
    """Return a limit for each group below what its solution used.

    `excess`: bytes by which the fullest device exceeds its memory, or 0 if that is not known.
    """
    if not excess:
        return [TIGHTER * most for most in used]
    return [
        max(most - SURE * excess * group.stages, TIGHTEST * most)
        for most, group in zip(used, groups, strict=True)
    ]
