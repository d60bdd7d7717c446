"""From the incumbents of a search to whole programs.

An incumbent is a solution of the folded graph, in which equal layers are alike. Where memory is no
question that is the optimum of the whole graph, too. Where memory binds, unlike layers may be
faster. Solving the whole graph anew takes much longer than the search's own solution, so that this
is done at once only where equal layers do not fit, and else for the last incumbents.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import NamedTuple

from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.planning.model.counts import Counts
from autopar.planning.model.effort import EFFORT
from autopar.planning.programs.front import AlonePricing, Front
from autopar.planning.programs.priced_program import (
    DraftProgram,
    PricedProgram,
    best_within,
    smallest,
    thriftier,
)
from autopar.planning.programs.rank import first_of
from autopar.planning.programs.whole_graph import on_whole
from autopar.planning.solve.solved_candidate import Solved
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode
from autopar.planning.stages.parts import Terms
from autopar.planning.stages.staged_program import StagedProgram, best_pipeline, pipeline_of
from autopar.planning.tables.requested import requested_tables
from autopar.planning.tables.tables import Known, Tables
from autopar.search import Infeasible, Solution
from autopar.sharding.schedule import Schedule

from .evaluator import Evaluator, Played

ROOMY = 1.25
"""How many times the bytes of the folded graph's solution one of the whole graph may add up to."""

Program = PricedProgram | StagedProgram


class Whole(NamedTuple):
    """A whole program; `may_gain`: the whole graph, solved anew, may have a faster one."""

    program: Program
    may_gain: bool


class WholePrograms:
    """Makes whole programs of the solutions of a request."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.solver = evaluator.solver
        self.folded = evaluator.folded
        self.request = evaluator.request
        self.known: tuple[Candidate | None, Known] = None, Known()

    def program(self, played: Played) -> Whole:
        """The whole program of an incumbent; raises `Infeasible` where none fits."""
        solved = played.solved
        own: Program | None
        if played.draft is not None:
            own = played.draft.without_waste().priced(tightened=played.limited)
        else:
            own = self.as_solved(solved)
        staged = solved.candidate.stages > 1
        # The cuts of a pipeline of equal layers may be worse than on the folded graph.
        if own is not None and not (staged and own.seconds > (1 + EFFORT.close) * played.seconds):
            # Where memory was no question, no solution of the whole graph promises less.
            return Whole(own, may_gain=played.limited or (staged and not solved.free))
        try:
            anew = self.solved_anew(solved)
        except Infeasible:
            if own is None:
                raise
            return Whole(own, may_gain=False)
        return Whole(first_of([anew] if own is None else [anew, own]), may_gain=False)

    def solved_anew(self, solved: Solved) -> Program:
        """The program that the whole graph's tables give, with host memory where that helps."""
        try:
            program = self._solved_anew(solved)
        except Infeasible:
            # True only the first time, as from then on the tables offer host memory.
            if not self.solver.binds(solved.candidate, solved.mode):
                raise
            return self._solved_anew(solved)
        # Less memory than the best solution needs costs time; state on the host may cost less.
        if program.tightened and self.solver.binds(solved.candidate, solved.mode):
            return first_of([program, self._solved_anew(solved)])
        return program

    def _solved_anew(self, solved: Solved) -> Program:
        candidate = solved.candidate
        if candidate.stages == 1:
            return self._in_one(solved)
        tables = self.tables(candidate, solved.mode, solved.hidden)
        terms = self._terms(candidate, solved.mode)
        return best_pipeline([self.solver.group(candidate)], [tables], terms)

    def _terms(self, candidate: Candidate, mode: Mode) -> Terms:
        return Terms(
            request=self.request, schedule=self.schedule(candidate, mode), always=self.solver.always
        )

    def as_solved(self, solved: Solved) -> Program | None:
        """The program of the search's own solution, equal layers alike; None if it does not fit."""
        candidate = solved.candidate
        solver = self.solver
        tables = self.tables(candidate, solved.mode, solved.hidden)
        schedule = self.schedule(candidate, solved.mode)
        solution = on_whole(solved.tables, solved.solution, self.folded.folding, tables)
        if solution is None:
            return None
        if candidate.stages == 1:
            return self._fitting(tables, solution, schedule, candidate)
        terms = self._terms(candidate, solved.mode)
        return pipeline_of(solver.group(candidate), tables, solution, terms)

    def _fitting(
        self, tables: Tables, solution: Solution, schedule: Schedule, candidate: Candidate
    ) -> PricedProgram | None:
        """The program of a solution, in units that fit the memory, if any do."""
        memory_limit = self.solver.memory_limit(candidate)
        draft = thriftier(DraftProgram.of(tables, solution, schedule), memory_limit)
        hosted = tables.host_of(solution.choices) <= tables.host_room
        return draft.priced() if draft.memory.total <= memory_limit and hosted else None

    def _in_one(self, solved: Solved) -> PricedProgram:
        """The best program of the whole graph's tables without stages, within the memory."""
        schedule = self.schedule(solved.candidate, solved.mode)
        tables = self.tables(solved.candidate, solved.mode, solved.hidden)
        memory_limit = self.solver.memory_limit(solved.candidate)
        method = self.request.search
        if self.evaluator.memory_bound.on_fronts:
            with contextlib.suppress(Infeasible):
                most = ROOMY * solved.solution.memory
                return self._on_front(tables, schedule, memory_limit, most)
            return smallest(tables, method=method, memory_limit=memory_limit, schedule=schedule)
        room = max(memory_limit - self.solver.always - solved.beyond, 0.0)
        return best_within(
            tables, method=method, memory_limit=memory_limit, room=room, schedule=schedule
        )

    def _on_front(
        self, tables: Tables, schedule: Schedule, memory_limit: float, most: float
    ) -> PricedProgram:
        """The fastest program on the front of the whole graph's tables, of up to `most` bytes."""
        front = Front(tables, AlonePricing(schedule, memory_limit), memory_limit)
        best = front.best(most=most)
        assert best is not None, "whatever fits is wanted"
        draft = thriftier(DraftProgram.of(tables, best.solution, schedule), memory_limit)
        return draft.priced(tightened=front.tightened)

    def schedule(self, candidate: Candidate, mode: Mode) -> Schedule:
        """The schedule inside a stage of a candidate's whole program."""
        return self.solver.schedule_of(candidate, mode, short=False)

    def tables(self, candidate: Candidate, mode: Mode, hidden: float = 0.0) -> Tables:
        """The tables of the whole graph; parts of the last candidate's serve its other modes."""
        count = candidate.micro_batches
        analysis = self.folded.analysis(short=False, micro_batches=count)
        work = replace(self.solver.work(candidate, mode, Counts(), short=False), hidden=hidden)
        if self.known[0] != candidate:
            self.known = candidate, Known()
        prices: MeshPrices = self.solver.prices(candidate)
        tables = requested_tables(
            self.request, analysis, prices, work, whole=count == 1, known=self.known[1]
        )
        return self.solver.offering(tables, candidate, mode)
