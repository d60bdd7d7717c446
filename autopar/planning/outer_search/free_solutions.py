"""Cases solved without a limit of memory: what their solutions promise, and whether they fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autopar.planning.solve.solved_candidate import Case
from autopar.planning.stages.estimate import StepEstimate
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


class FreeSolutions:
    """The solutions of cases without a limit of memory.

    `bounds`: on the sum of a case's tables; they hold in all its modes.
    """

    def __init__(self, solver: CandidateSolver) -> None:
        self.solver = solver
        self.bounds: dict[Case, float] = {}

    def of(
        self, case: Case, below: float, tables: Callable[[], Tables], *, sure: bool = False
    ) -> Free:
        """The solution of a case without a limit of memory; its bound tells of all modes.

        `sure`: there is one, whatever a bound says.
        """
        free = self.solver.bounds.figures.once(
            ("free", case.candidate.key, case.mode, case.hidden, below, self.solver.is_bound(case))
            + ((sure,) if sure else ()),
            lambda: self._solved(case, tables, below, sure=sure),
        )
        if free.solution is not None:
            self.bounds[case] = free.solution.lower_bound
        return free

    def _solved(self, case: Case, made: Callable[[], Tables], below: float, *, sure: bool) -> Free:
        solver = self.solver
        candidate = case.candidate
        room = solver.room(candidate)
        # What does not fit needs no tables: most modes of many candidates are such.
        least = 0.0 if sure else solver.least_saved(case)
        wanted = solver.is_exact or solver.request.may_offload
        if least > room:
            # Until there is an incumbent, the bound of the first mode orders the others.
            wanted = below == math.inf and case.mode == next(iter(solver.modes()))
        if not wanted:
            return Free(least=least)
        tables = made()
        solution = solver.free_solution(candidate, tables, below)
        # Nothing else is asked of what does not fit, or is too slow.
        slow = solver.is_exact and solver.promise_of(candidate, solution.lower_bound) >= below
        if least > room or slow:
            return Free(least=least, solution=solution)
        beyond = solver.beyond(case, tables, solution)
        fits = solution.memory + beyond <= room
        fits = fits and tables.host_of(solution.choices) <= tables.host_room
        step = solver.step_of(case, tables, solution) if fits and solver.is_exact else None
        return Free(least=least, solution=solution, beyond=beyond, fits=fits, step=step)
