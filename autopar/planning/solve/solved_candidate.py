"""A solved candidate: the solution of its tables in a mode, and the step that it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode
from autopar.planning.tables.tables import Tables
from autopar.search import Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A candidate in a mode, with the share of its parameters' collectives taken as `hidden`."""

    candidate: Candidate
    mode: Mode
    hidden: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """The tables of a case with their solution.

    `made`: gives the tables, which most cases need no more once they are solved. `seconds`: the
    step that the tables add up to, with equal stages. `promise`: seconds that its program hardly
    undercuts. `free`: the solution is the optimum without a memory limit, and fits. `beyond`: bytes
    that its program needs beyond the sum of its tables.
    """

    case: Case
    made: Callable[[], Tables]
    solution: Solution
    seconds: float
    promise: float
    free: bool = False
    beyond: float = 0.0

    @property
    def tables(self) -> Tables:
        """The tables of the case."""
        return self.made()

    @property
    def candidate(self) -> Candidate:
        """Devices, stages, mesh and micro-batches."""
        return self.case.candidate

    @property
    def mode(self) -> Mode:
        """ZeRO and recompute."""
        return self.case.mode

    @property
    def hidden(self) -> float:
        """The share of the parameters' collectives that the tables take as hidden."""
        return self.case.hidden
