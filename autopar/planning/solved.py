"""What is solved of a candidate: the mode in which its parameters and activations are kept, and the solution of its tables."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.search import Solution

from .candidates import Candidate
from .tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What is recomputed, and how parameters that are stored split are used (see `Request`)."""

    zero: int
    recompute: str

    def repeats(self, other: Mode) -> bool:
        """Whether it does all that the other mode does, and more, so that it is no faster without a limit of memory."""
        recomputes = self.recompute == "full" or other.recompute in ("none", self.recompute)
        return recomputes and (0 < other.zero <= self.zero or other.zero == self.zero)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """The priced tables of a candidate and their solution; `seconds` of the step as the tables add it up, and a bound of them.

    `free`: whether the solution is the best without a limit of memory too, so that no other mode is faster. `beyond`: bytes that its
    program needs beyond what the tables add up to, where the memory is short. `hidden`: as of `Work`, by which it was found.
    """

    candidate: Candidate
    mode: Mode
    tables: Tables
    solution: Solution
    seconds: float
    bound: float
    free: bool = False
    beyond: float = 0.0
    hidden: float = 0.0
