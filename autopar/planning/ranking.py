"""The results of the outer search so far: solved candidates in their order, misfits, and a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from .candidates import Candidate, refines
from .solved_candidate import Mode, Solved
from .tuning import TUNING

Progress = Callable[[int, int, str], None]
"""Called with the number of steps done, the number of all, and the present step in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A candidate without a solution that fits the memory, and the least bytes that it needs on a device."""

    candidate: Candidate
    mode: Mode
    needed: float


@dataclass(slots=True, kw_only=True)
class Ranking:
    """The results of the outer search.

    `solved`: the cheapest first. `bound`: seconds of every candidate, at least. `forbidden`: the number of candidates
    that the pins forbid. `complete`: whether the search ran to its end.
    """

    solved: list[Solved] = field(default_factory=list)
    bound: float = 0.0
    misfits: list[Misfit] = field(default_factory=list)
    forbidden: int = 0
    complete: bool = True


def needless_last(solved: Sequence[Solved]) -> list[Solved]:
    """The solutions with those last that are on finer meshes and gain nothing: a finer mesh can do all that the coarser one can."""
    if len({len(one.candidate.mesh.axes) for one in solved}) == 1:
        return list(solved)  # none is finer than another
    needless = [any(_does(other, one) for other in solved) for one in solved]
    return [one for last in (False, True) for one, is_needless in zip(solved, needless, strict=True) if is_needless == last]


def _does(coarse: Solved, fine: Solved) -> bool:
    """Whether a solution on a coarser mesh takes hardly longer, in as many stages and micro-batches."""
    one, other = coarse.candidate, fine.candidate
    return (
        (one.stages, one.micro_batches) == (other.stages, other.micro_batches)
        and (1 - TUNING.gain) * coarse.seconds <= fine.seconds
        and refines(other.mesh, one.mesh)
    )


class Ranked(Protocol):
    """A result with a time and a rank, which begins with the time."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""

    @property
    def rank(self) -> tuple[float, int, int]:
        """Seconds, then the figures that decide between equal ones."""


R = TypeVar("R", bound=Ranked)


def first_of(found: Sequence[R]) -> R:
    """The first by rank; ranks are computed only if seconds are equal."""
    least = min(one.seconds for one in found)
    near = [one for one in found if one.seconds == least]
    return near[0] if len(near) == 1 else min(near, key=lambda one: one.rank)
