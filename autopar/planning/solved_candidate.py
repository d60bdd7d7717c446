"""A solved candidate: the mode of its parameters and activations, and the solution of its tables."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.search import Solution

from .candidates import Candidate
from .tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """The recompute mode and the ZeRO stage (see `Request`)."""

    zero: int
    recompute: str

    def repeats(self, other: Mode) -> bool:
        """Whether this mode does all the work of the other one, so it is no faster without a memory limit."""
        recomputes = self.recompute == "full" or other.recompute in ("none", self.recompute)
        return recomputes and (0 < other.zero <= self.zero or other.zero == self.zero)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """The priced tables of a candidate and their solution; `seconds`: the step by its tables, `bound`: its lower bound.

    `free`: the unconstrained optimum fits, so no other mode is faster. `beyond`: the program's bytes beyond the sum of
    its tables, if memory is short. `hidden`: that of the tables' `Multiplicities`. `exact`: the seconds are those of its program.
    `uncut`: they are those of equal stages, which are no better than others.
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
    exact: bool = False
    uncut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSolution:
    """The solution of a pipeline's best cuts: the step, the bytes of the fullest device; `tightened` as of `StagedProgram`."""

    tables: Tables
    solution: Solution
    seconds: float
    memory: float
    tightened: bool
