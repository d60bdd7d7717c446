"""From the incumbents of a search to whole programs, in which equal layers are alike."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.planning.model.counts import Counts
from autopar.planning.programs.priced_program import DraftProgram, PricedProgram, thriftier
from autopar.planning.programs.whole_graph import on_whole
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode
from autopar.planning.stages.parts import Terms
from autopar.planning.stages.staged_program import StagedProgram, best_pipeline, pipeline_of
from autopar.planning.tables.requested import requested_tables
from autopar.planning.tables.tables import Known, Tables
from autopar.search import Infeasible, Solution
from autopar.sharding.schedule import Schedule

from .evaluator import Evaluator, Played

Program = PricedProgram | StagedProgram


class WholePrograms:
    """Makes whole programs of the solutions of a request."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.solver = evaluator.solver
        self.folded = evaluator.folded
        self.request = evaluator.request
        self.known: tuple[Candidate | None, Known] = None, Known()

    def program(self, played: Played) -> Program:
        """The whole program of an incumbent; raises `Infeasible` where it does not fit."""
        # Without stages it was written out when it was played.
        if played.draft is not None:
            return played.draft.without_waste().priced()
        solved = played.solved
        candidate = solved.candidate
        tables = self.tables(candidate, solved.mode, solved.hidden)
        solution = on_whole(solved.tables, solved.solution, self.folded.folding, tables)
        # What layers share may have another choice in the whole graph's tables.
        if solution is None:
            limit = self.solver.memory_limit(candidate)
            raise Infeasible(math.nextafter(limit, math.inf), limit)
        if candidate.stages == 1:
            return self._fitting(tables, solution, self.schedule(candidate, solved.mode), candidate)
        schedule = self.schedule(candidate, solved.mode)
        terms = Terms(request=self.request, schedule=schedule, always=self.solver.always)
        group = self.solver.group(candidate)
        try:
            return pipeline_of(group, tables, solution, terms)
        except Infeasible:
            # Stages of the whole graph may need a little more than folded ones.
            return best_pipeline([group], [tables], terms)

    def _fitting(
        self, tables: Tables, solution: Solution, schedule: Schedule, candidate: Candidate
    ) -> PricedProgram:
        """The program of a solution, in units that fit the memory."""
        memory_limit = self.solver.memory_limit(candidate)
        draft = thriftier(DraftProgram.of(tables, solution, schedule), memory_limit)
        hosted = tables.host_of(solution.choices) <= tables.host_room
        if draft.memory.total > memory_limit or not hosted:
            needed = max(draft.memory.total, math.nextafter(memory_limit, math.inf))
            raise Infeasible(needed, memory_limit)
        return draft.priced()

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
