"""What the outer search has found so far: solved candidates in their order, what did not fit, and a bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
