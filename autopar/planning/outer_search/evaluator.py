"""A candidate in a mode, first as a promise of its tables, then played as a program.

A step is X + max(0, G - B): G the collectives of parameters, B the computation that can hide them.
It is the maximum over l in [0, 1] of X + l (G - B), so the tables are solved at a few shares 1 - l
that are hidden. The largest share promises least. What counts is the program: it is played at the
largest share, and at smaller ones where it takes longer than promised.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.planning.model.effort import EFFORT
from autopar.planning.programs.priced_program import DraftProgram, thriftier
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.solve.within_limits import quick_method
from autopar.planning.space.candidates import Candidate
from autopar.planning.stages.parts import Terms
from autopar.planning.stages.stage import Slower
from autopar.planning.stages.staged_program import StagedProgram, best_pipeline
from autopar.planning.stages.whole_model import expand
from autopar.planning.tables.tables import Tables
from autopar.search import Infeasible, Interrupted, NoAssignment

from .candidate_solver import CandidateSolver
from .free_solutions import Free, FreeSolutions
from .memory_bound import solve_bound
from .written_out import WrittenOut


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """A solution with its program's step.

    `limited`: memory kept it from a faster one. `draft`: of the whole graph, if there is one stage.
    """

    solved: Solved
    seconds: float
    limited: bool
    draft: DraftProgram | None = None


class Bounded(Infeasible):
    """A case that does not fit, as the bytes that no choice undercuts show."""


class Evaluator:
    """Promises and programs of candidates.

    `free`: the solutions without a limit of memory. `interrupted`: the solution of an interrupted
    solve.
    """

    def __init__(self, solver: CandidateSolver) -> None:
        self.solver = solver
        self.folded = solver.folded
        self.request = solver.request
        self.interrupted: Solved | None = None
        self.free = FreeSolutions(solver)
        self.written_out = WrittenOut(solver)
        # Pipelines are solved within tightening limits for their order alone.
        self.quickly = replace(self.request, search=quick_method(self.request.search))

    # --- Promises. ---

    def promise(
        self, case: Case, below: float = math.inf, *, bound: Solved | None = None
    ) -> Solved | None:
        """The best solution of a case within the memory; None where it promises `below` or more.

        `bound`: a solution at another hidden share, where memory binds it. Raises `Infeasible`,
        with the least memory that would do as far as it is known (`Bounded`: a bound of it), and
        `NoAssignment`.
        """
        try:
            if bound is not None:
                # What memory binds at one share it binds at others, so that no solution without a
                # limit is needed, and programs need as much beyond their tables.
                return solve_bound(self.solver, case, self.tables(case)(), bound.beyond)
            return self._promise(case, below)
        except Interrupted as interrupt:
            if interrupt.best is not None:
                tables = self.solver.tables(case)
                self.interrupted = self.solver.promised(case, tables, interrupt.best)
            raise

    def _promise(self, case: Case, below: float) -> Solved | None:
        tables = self.tables(case)
        free = self.free.of(case, below, tables)
        room = self.solver.room(case.candidate)
        # Every choice saves at least these bytes, which is seen without a solution.
        if free.least > room:
            raise Bounded(free.least, room)
        return self._solved(case, tables, below, free)

    def solve(self, case: Case) -> Solved | None:
        """The best solution of a case, whatever a bound says; raises as `promise`."""
        tables = self.tables(case)
        return self._solved(case, tables, math.inf, self.free.of(case, math.inf, tables, sure=True))

    def tables(self, case: Case) -> Callable[[], Tables]:
        """Gives the tables of a case, made when they are first asked for."""
        # What is known of the case now counts, whenever that is.
        binding = self.solver.is_bound(case)
        return functools.cache(lambda: self.solver.tables_within(case, binding=binding))

    def _solved(
        self, case: Case, tables: Callable[[], Tables], below: float, free: Free
    ) -> Solved | None:
        if free.solution is None:
            return solve_bound(self.solver, case, tables(), 0.0)
        solver = self.solver
        candidate = case.candidate
        bound = free.solution.lower_bound
        promise = solver.promise_of(candidate, bound)
        if solver.is_exact and promise >= below:
            return None
        if free.step is not None:
            return Solved(
                case=case,
                made=tables,
                solution=free.solution,
                seconds=free.step.seconds,
                promise=promise,
                # A pipeline whose best schedule lacks memory is bound by memory, too.
                free=not free.step.short,
                beyond=free.beyond,
            )
        # A limit of memory can only make the optimum slower.
        if solver.is_exact and solver.least(candidate, bound) >= below:
            return None
        offered = tables()
        # Host memory is offered only where memory is known to bind, as its choices make the tables
        # larger.
        if not free.fits and solver.binds(candidate, case.mode):
            offered = solver.offering(offered, candidate, case.mode)
        # A negative `beyond` says that the program needs less than its tables add up to.
        room = solver.room(candidate)
        loosest = max(room, room - free.beyond)
        if solver.is_exact and solver.proves_too_slow(candidate, offered, loosest, below):
            return None
        return solve_bound(solver, case, offered, free.beyond)

    # --- Programs. ---

    def play(self, solved: Solved, below: float = math.inf) -> list[Played]:
        """The programs of a case, the fastest first, within `below` seconds or near it (pipelines).

        They differ in the share of the parameters' collectives that their tables take as hidden.
        Raises `Infeasible` where no program fits the memory.
        """
        staged = solved.candidate.stages > 1
        # Graphs of three axes take long to solve: the first share has to lead below the best.
        split = not staged and len(solved.candidate.mesh.axes) > EFFORT.plain_axes
        enough = EFFORT.behind * below if staged else below
        programs: list[Played] = []
        failures: list[Infeasible] = []
        for other in self._at_shares(solved):
            try:
                played = self._played(other, enough)
            except Infeasible as error:
                failures.append(error)
                continue
            if played is None:
                # A pipeline that is far behind at one share is so at others.
                if staged or split:
                    break
                continue
            programs.append(played)
            enough = min(enough, played.seconds) if not staged else enough
            # The program keeps its promise, and every smaller share promises a longer step.
            if played.seconds <= EFFORT.exposed * solved.promise:
                break
        if not programs and failures:
            raise failures[0]
        return sorted(programs, key=lambda played: played.seconds)

    def _at_shares(self, solved: Solved) -> Iterator[Solved]:
        """The solution, then the other ones where less of the parameters' collectives is hidden."""
        yield solved
        # Where memory binds a pipeline, what it stores decides, and each cut takes several solves.
        limited = solved.candidate.stages > 1 and not solved.free
        if solved.hidden == 0.0 or limited:
            return
        most = solved.hidden
        shares = [part * most for part in EFFORT.shares]
        if solved.candidate.stages > 1:
            # One stage may send while others compute, so that all may be hidden.
            shares.insert(0, 1.0)
        seen = {solved.solution.choices}
        for share in shares:
            with contextlib.suppress(Infeasible, NoAssignment):
                case = replace(solved.case, hidden=share)
                other = self.promise(case, bound=None if solved.free else solved)
                # The same choices make the same program.
                if other is not None and other.solution.choices not in seen:
                    seen.add(other.solution.choices)
                    yield other

    def _played(self, solved: Solved, below: float) -> Played | None:
        """The program of one solution; None where it takes `below` seconds or more."""
        if solved.candidate.stages > 1:
            return self._pipeline(solved, below)
        return self._alone(solved, below)

    def _misfit(self, candidate: Candidate, memory: float) -> Infeasible:
        """The error of a program of so many bytes a device, as bytes of all stages' tables."""
        needed = candidate.stages * (memory - self.solver.always)
        room = self.solver.room(candidate)
        return Infeasible(max(needed, math.nextafter(room, math.inf)), room)

    def _alone(self, solved: Solved, below: float) -> Played | None:
        """The program without stages of a folded solution, written out for the whole graph."""
        seconds = self.written_out.seconds(solved)
        if seconds >= below:
            return None
        limit = self.solver.memory_limit(solved.candidate)
        draft = self.written_out.program(solved)
        # Of those that fit, only incumbents are looked at without recompute: it takes another walk,
        # and what they are without it belongs to another mode, which is searched as well.
        if draft.memory.total > limit:
            draft = draft.without_waste()
        # Smaller units of parameters may make it fit, but then the step is another one.
        fitting = thriftier(draft, limit)
        if fitting.memory.total > limit:
            raise self._misfit(solved.candidate, fitting.memory.total)
        seconds = fitting.timeline.step
        if seconds >= below:
            return None
        return Played(
            solved=solved,
            seconds=seconds,
            limited=not solved.free or fitting is not draft,
            draft=fitting,
        )

    # --- Pipelines. ---

    def _pipeline(self, solved: Solved, below: float) -> Played | None:
        """The fastest cuts of a pipeline, with host memory where a stage lacks room."""
        best: Played | None = None
        failure: Infeasible | None = None
        try:
            best = self._cut(solved, solved.tables, below)
        except Infeasible as error:
            failure = error
        # What fits all stages together may not fit each of them: host memory may help there, too.
        short = best.limited if best is not None else failure is not None
        if short and self.solver.binds(solved.candidate, solved.mode):
            tables = self.solver.offering(solved.tables, solved.candidate, solved.mode)
            with contextlib.suppress(Infeasible):
                other = self._cut(solved, tables, below)
                if other is not None and (best is None or other.seconds < best.seconds):
                    best = other
        if best is None and failure is not None:
            raise self._misfit(solved.candidate, failure.minimum_memory)
        return best

    def _cut(self, solved: Solved, tables: Tables, below: float) -> Played | None:
        """The fastest cuts on some tables of a pipeline."""
        try:
            program = self._cut_program(solved, tables, below)
        except Slower:
            return None
        if program.seconds >= below:
            return None
        part = program.parts[0]
        full = program.memory > EFFORT.plenty * self.solver.memory_limit(solved.candidate)
        return Played(
            solved=replace(solved, made=lambda: part.tables, solution=part.solution),
            seconds=program.seconds,
            limited=full and program.tightened,
        )

    def _terms(self, solved: Solved) -> Terms:
        return Terms(
            request=self.quickly,
            schedule=self.solver.schedule_of(solved.candidate, solved.mode, short=True),
            always=self.solver.always,
            expand=functools.partial(expand, self.folded),
        )

    def _cut_program(self, solved: Solved, tables: Tables, below: float) -> StagedProgram:
        return best_pipeline(
            [self.solver.group(solved.candidate)],
            [tables],
            self._terms(solved),
            solved=solved.solution if tables is solved.tables else None,
            too_slow=below,
        )
