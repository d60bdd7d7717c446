"""The programs of solved candidates on the whole graph: solved there anew, and as the walk's own solutions written out.

The walk's solution is of the folded graph, and its price that of its program. The whole graph, solved anew, may have unlike layers where
these pay by the tables; by the program they may cost. So the faster of both is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from autopar.costmodel.step.pricing import MeshPrices
from autopar.search import Infeasible, NoAssignment, Solution

from ..sharding.schedule import Schedule
from .candidate_solver import CandidateSolver
from .candidates import Candidate
from .fronts import Front, price_program
from .multiplicities import Counts
from .pipeline_search import StagedProgram, best_pipeline, pipeline_of
from .priced_program import DraftProgram, PricedProgram, best_within, smallest, thriftier
from .ranking import first_of
from .solved_candidate import Mode, Solved
from .tables import Known, Tables
from .tuning import TUNING
from .unfolding import on_whole, unfold

ROOMY = 1.25
"""How many times the bytes of the folded graph's solution one of the whole graph may add up to."""


class WholePrograms:
    """Makes the programs of a request's candidates; `noted` is told of each candidate whose tables are made."""

    def __init__(self, solver: CandidateSolver, noted: Callable[[Candidate], None]) -> None:
        self.solver, self.folded, self.request, self.noted = solver, solver.folded, solver.request, noted
        self.known: tuple[Candidate | None, Known] = None, Known()

    def best(self, solved: Solved) -> PricedProgram | StagedProgram:
        """The exact program of a candidate, with host memory where it needs more than the tables added up to; raises `Infeasible`."""
        try:
            found = self._best(solved)
        except Infeasible:
            if not self.solver.binds(solved.candidate, solved.mode):
                raise
            return self._best(solved)
        if found.tightened and self.solver.binds(solved.candidate, solved.mode):
            return first_of([found, self._best(solved)])
        return found

    def _best(self, solved: Solved) -> PricedProgram | StagedProgram:
        """The best of the program that the whole graph's tables give, and, where that takes longer than promised, the walk's own."""
        try:
            found, failure = self._solved_anew(solved), None
        except Infeasible as error:
            found, failure = None, error
        if found is None or found.seconds > (1 + TUNING.rounding) * solved.seconds:
            own = self.as_solved(solved)
            if own is not None and (found is None or own.seconds < found.seconds):
                return own
        if found is None:
            assert failure is not None
            raise failure
        return found

    def _solved_anew(self, solved: Solved) -> PricedProgram | StagedProgram:
        """The program that the tables of the whole graph give."""
        candidate, request, solver = solved.candidate, self.request, self.solver
        schedule = self.schedule(candidate, solved.mode)
        if candidate.stages > 1:
            tables = self.tables(candidate, solved.mode, solved.hidden)
            return best_pipeline([solver.group(candidate)], lambda _: tables, schedule, request, always=solver.always)
        if not self.folded.is_small and (unfolded := self._unfolded(solved, schedule)) is not None:
            return unfolded
        found = [self._in_one(solved, schedule, solved.hidden)]
        if solved.hidden > 0.0 and (self.folded.is_small or not found[0].hides_reductions):
            found.append(self._in_one(solved, schedule, 0.0))
        if solved.hidden > 0.0 and self.folded.is_small and first_of(found).seconds > TUNING.promised * solved.seconds:
            found.append(self._in_one(solved, schedule, 0.0, waits=0.5 * self._prices(candidate).longest_unit))
        return first_of(found)

    def as_solved(self, solved: Solved) -> PricedProgram | StagedProgram | None:
        """The program of the walk's own solution, all layers as it has them; None where it does not fit."""
        candidate, solver = solved.candidate, self.solver
        tables, schedule = self.tables(candidate, solved.mode, solved.hidden), self.schedule(candidate, solved.mode)
        solution = on_whole(solved.tables, solved.solution, self.folded.folding, tables)
        if solution is None:
            return None
        if candidate.stages > 1:
            return pipeline_of(solver.group(candidate), tables, solution, schedule, self.request, always=solver.always)
        return self._fitting(tables, solution, schedule, candidate)

    def _fitting(self, tables: Tables, solution: Solution, schedule: Schedule, candidate: Candidate) -> PricedProgram | None:
        """The program of a solution, in units that fit the memory, if any do."""
        memory_limit = self.solver.memory_limit(candidate)
        draft = thriftier(DraftProgram.of(tables, solution, schedule), memory_limit)
        hosted = tables.host_of(solution.choices) <= tables.host_room
        return draft.priced() if draft.memory.total <= memory_limit and hosted else None

    def _unfolded(self, solved: Solved, schedule: Schedule) -> PricedProgram | None:
        """The program of a folded solution, written out for the whole graph; None where it does not fit or a better one may exist.

        Without a limit equal layers cost the same wherever they stand, so that the folded optimum is the whole graph's.
        """
        if solved.solution.gap > TUNING.unfolded:
            return None
        others = [solved]
        if solved.hidden > 0.0 and self.solver.hides(solved.candidate, solved.mode):
            with contextlib.suppress(Infeasible, NoAssignment):
                others += [other] if (other := self.solver.solve(solved.candidate, solved.mode, hidden=0.0)) is not None else []
        found = [self._written_out(one, schedule) for one in others]
        fitting = [one for one in found if one.memory <= self.solver.memory_limit(solved.candidate)]
        return first_of(fitting) if fitting else None

    def _written_out(self, solved: Solved, schedule: Schedule) -> PricedProgram:
        """The program of a folded solution on the whole graph, in units that fit the memory if any do."""
        analysis = self.folded.analysis(short=False, micro_batches=solved.candidate.micro_batches)
        tables, choices = unfold(solved.tables, solved.solution.choices, self.folded.folding, analysis)
        draft = DraftProgram.of(tables, replace(solved.solution, choices=choices), schedule)
        return thriftier(draft, self.solver.memory_limit(solved.candidate)).priced()

    def _in_one(self, solved: Solved, schedule: Schedule, hidden: float, waits: float = 0.0) -> PricedProgram:
        """The program without stages, if that share of the gradients' reduction ran under the backward pass.

        A step is X + max(0, G - B), G the reduction of gradients and B the compute that can hide it: the maximum over l in [0, 1] of
        X + l (G - B). The two ends of l are tried, the upper one with the slowdown of what is hidden. What computation waits for, such as
        the values that it reads, comes behind what was begun before it on the same axis: `waits`, on average half of a unit's reduction.
        """
        tables, memory_limit = self.tables(solved.candidate, solved.mode, hidden, waits), self.solver.memory_limit(solved.candidate)
        if self.solver.on_fronts:
            with contextlib.suppress(Infeasible):
                return self._on_front(tables, schedule, memory_limit, ROOMY * solved.solution.memory)
            return smallest(tables, method=self.request.method, memory_limit=memory_limit, schedule=schedule)
        room = max(memory_limit - self.solver.always - solved.beyond, 0.0)
        return best_within(tables, method=self.request.method, memory_limit=memory_limit, room=room, schedule=schedule)

    def _on_front(self, tables: Tables, schedule: Schedule, memory_limit: float, most: float) -> PricedProgram:
        """The fastest program on the front of the whole graph's tables, of up to so many bytes by these."""
        front = Front(tables, price_program(schedule, memory_limit), memory_limit)
        best = front.best(most)
        return thriftier(DraftProgram.of(tables, best.solution, schedule), memory_limit).priced(tightened=front.tightened)

    def _prices(self, candidate: Candidate) -> MeshPrices:
        return self.folded.prices(candidate.cluster, candidate.mesh, candidate.stages)

    def schedule(self, candidate: Candidate, mode: Mode) -> Schedule:
        """What the runtime is told of a candidate."""
        return self.solver.schedule(mode, candidate.micro_batches, [self._prices(candidate)], short=False)

    def tables(self, candidate: Candidate, mode: Mode, hidden: float = 0.0, waits: float = 0.0) -> Tables:
        """The tables of the whole graph; the last candidate's parts are kept for its other modes."""
        self.noted(candidate)
        analysis = self.folded.analysis(short=False, micro_batches=candidate.micro_batches)
        work = replace(self.solver.work(candidate, mode, Counts(), short=False), hidden=hidden, waits=waits)
        if self.known[0] != candidate:
            self.known = candidate, Known()
        whole, known = candidate.micro_batches == 1, self.known[1]
        return self.solver.offering(self.request.tables(analysis, self._prices(candidate), work, whole=whole, known=known), candidate, mode)
