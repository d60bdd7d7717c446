"""Cases solved without a limit of memory: what their solutions promise, and whether they fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autopar.planning.solve.solved_candidate import Case
from autopar.planning.stages.estimate import StepEstimate, Sums
from autopar.planning.tables.tables import Tables
from autopar.search import Solution

from .candidate_solver import CandidateSolver


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """The solution of a case without a limit of memory (None: none is wanted).

    `least`: bytes that every choice saves. `beyond`: as of `Solved`. `fits`: whether the program
    fits the memory of devices and hosts; then `step` is that which its tables add up to.
    """

    least: float
    solution: Solution | None = None
    beyond: float = 0.0
    fits: bool = False
    step: StepEstimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlimited:
    """A solution of a case, with all that does not depend on the memory of devices.

    `is_hosted`: whether what it leaves in host memory fits there. `sums`: those of its tables,
    where these are solved exactly.
    """

    solution: Solution
    is_hosted: bool
    sums: Sums | None


_About = tuple[Case, bool]
"""A case, and whether memory is known to bind it, as its tables offer more then."""


class FreeSolutions:
    """The solutions of cases without a limit of memory.

    `bounds`: on the sum of a case's tables; they hold in all its modes.
    """

    def __init__(self, solver: CandidateSolver) -> None:
        self.solver = solver
        self.bounds: dict[Case, float] = {}
        self._least: dict[_About, float] = {}
        self._unlimited: dict[tuple[_About, float], Unlimited] = {}
        self._beyond: dict[tuple[_About, Solution], float] = {}

    def of(
        self, case: Case, below: float, tables: Callable[[], Tables], *, sure: bool = False
    ) -> Free:
        """The solution of a case without a limit of memory; its bound tells of all modes.

        `sure`: there is one, whatever a bound says.
        """
        free = self._solved(case, tables, below, sure=sure)
        if free.solution is not None:
            self.bounds[case] = free.solution.lower_bound
        return free

    def _solved(
        self, case: Case, tables: Callable[[], Tables], below: float, *, sure: bool
    ) -> Free:
        solver = self.solver
        candidate = case.candidate
        room = solver.room(candidate)
        about = case, solver.is_bound(case)
        least = 0.0
        # What does not fit needs no tables: most modes of many candidates are such.
        if not sure:
            if about not in self._least:
                self._least[about] = solver.least_saved(case)
            least = self._least[about]
        wanted = solver.is_exact or solver.request.may_offload
        if least > room:
            # Until there is an incumbent, the bound of the first mode orders the others.
            wanted = below == math.inf and case.mode == next(iter(solver.modes()))
        if not wanted:
            return Free(least=least)
        unlimited = self._unlimited_of(about, tables, below)
        solution = unlimited.solution
        # Nothing else is asked of what does not fit, or is too slow.
        slow = solver.is_exact and solver.promise_of(candidate, solution.lower_bound) >= below
        if least > room or slow:
            return Free(least=least, solution=solution)
        beyond = 0.0
        if solver.may_exceed(candidate, solution):
            if (about, solution) not in self._beyond:
                self._beyond[about, solution] = solver.beyond(case, tables(), solution)
            beyond = self._beyond[about, solution]
        fits = solution.memory + beyond <= room and unlimited.is_hosted
        step = None
        if fits and unlimited.sums is not None:
            step = solver.step_within(case, solution, unlimited.sums)
        return Free(least=least, solution=solution, beyond=beyond, fits=fits, step=step)

    def _unlimited_of(self, about: _About, made: Callable[[], Tables], below: float) -> Unlimited:
        """The solution of a case, of which no more than a bound that is enough is proven.

        One whose bound stays below that is the same for whatever else is enough.
        """
        case, _ = about
        enough = self.solver.enough(case.candidate, below)
        known = self._unlimited.get((about, math.inf))
        if known is None or known.solution.lower_bound >= enough:
            known = self._unlimited.get((about, enough))
        if known is None:
            known = self._solved_freely(case, made(), below)
            # A bound that is enough ends the work of a solution, which is then of that bound alone.
            ended = known.solution.lower_bound >= enough
            self._unlimited[about, enough if ended else math.inf] = known
        return known

    def _solved_freely(self, case: Case, tables: Tables, below: float) -> Unlimited:
        solver = self.solver
        solution = solver.free_solution(case.candidate, tables, below)
        return Unlimited(
            solution=solution,
            is_hosted=tables.host_of(solution.choices) <= tables.host_room,
            sums=solver.sums_of(case, tables, solution) if solver.is_exact else None,
        )
