"""What the outer search has found so far: solved candidates in their order, what did not fit, and a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from .candidates import Candidate
from .solved import Mode, Solved

Progress = Callable[[int, int, str], None]
"""Called as (done, of, what)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A candidate of which no solution fits the memory, and the bytes that the thriftiest needs on a device."""

    candidate: Candidate
    mode: Mode
    needed: float


@dataclass(slots=True, kw_only=True)
class Ranking:
    """What the outer search found: the solved candidates, the cheapest first; a bound for all; what did not fit, and how many the pins
    forbid."""

    solved: list[Solved] = field(default_factory=list)
    bound: float = 0.0
    misfits: list[Misfit] = field(default_factory=list)
    forbidden: int = 0
    complete: bool = True


class Ranked(Protocol):
    """What has a time, and an order among its like that begins with it."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""

    @property
    def rank(self) -> tuple[float, int, int]:
        """Seconds, and what decides between equal ones."""


R = TypeVar("R", bound=Ranked)


def first_of(found: Sequence[R]) -> R:
    """The first by rank, of which more than the seconds is looked at only where these are equal."""
    least = min(one.seconds for one in found)
    near = [one for one in found if one.seconds == least]
    return near[0] if len(near) == 1 else min(near, key=lambda one: one.rank)
