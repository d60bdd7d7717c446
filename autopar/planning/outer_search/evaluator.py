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
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.planning.model.effort import EFFORT
from autopar.planning.programs.priced_program import DraftProgram, thriftier
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.solve.within_limits import QUICK_METHOD
from autopar.planning.space.candidates import Candidate
from autopar.planning.stages.parts import Terms
from autopar.planning.stages.stage import Slower
from autopar.planning.stages.staged_program import StagedProgram, best_pipeline
from autopar.planning.stages.whole_model import expand
from autopar.planning.tables.tables import Tables
from autopar.search import Infeasible, Interrupted, NoAssignment, Solution

from .candidate_solver import CandidateSolver
from .memory_bound import MemoryBound
from .written_out import WrittenOut


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """A solution with its program's step.

    `limited`: memory kept it from a faster solution or schedule. `draft`: the program of the whole
    graph, where there are no stages and it is faster than the incumbent.
    """

    solved: Solved
    seconds: float
    limited: bool
    draft: DraftProgram | None = None


class Bounded(Infeasible):
    """A case that does not fit, as the bytes that no choice undercuts show."""


class Evaluator:
    """Promises and programs of candidates.

    `free_bounds`: bounds on the sum of a case's tables without a limit of memory. `interrupted`:
    the solution of an interrupted solve.
    """

    def __init__(self, solver: CandidateSolver) -> None:
        self.solver = solver
        self.folded = solver.folded
        self.request = solver.request
        self.memory_bound = MemoryBound(solver)
        self.interrupted: Solved | None = None
        self.free_bounds: dict[Case, float] = {}
        self.written_out = WrittenOut(solver)
        # Pipelines are solved within tightening limits for their order alone.
        self.quickly = self.request
        if solver.is_exact:
            self.quickly = replace(self.request, search=QUICK_METHOD)

    # --- Promises. ---

    def promise(self, case: Case, below: float = math.inf) -> Solved | None:
        """The best solution of a case within the memory; None where it promises `below` or more.

        Raises `Infeasible`, with the least memory that would do as far as it is known (`Bounded`:
        a bound of it), and `NoAssignment`.
        """
        try:
            return self._promise(case, below)
        except Interrupted as interrupt:
            if interrupt.best is not None:
                tables = self.solver.tables(case)
                self.interrupted = self.solver.promised(case, tables, interrupt.best)
            raise

    def _promise(self, case: Case, below: float) -> Solved | None:
        tables = self.solver.tables(case)
        room = self.solver.room(case.candidate)
        # Every choice saves at least these bytes, which is seen without a solution.
        if (least := tables.least_saved()) > room:
            # Until there is an incumbent, the bound of the first mode orders the others.
            if below == math.inf and case.mode == next(iter(self.solver.modes())):
                self._free_solution(case, tables, below)
            raise Bounded(least, room)
        return self._solved(case, tables, below)

    def solve(self, case: Case) -> Solved | None:
        """The best solution of a case, whatever a bound says; raises as `promise`."""
        return self._solved(case, self.solver.tables(case), math.inf)

    def _solved(self, case: Case, tables: Tables, below: float) -> Solved | None:
        solver = self.solver
        candidate = case.candidate
        room = solver.room(candidate)
        beyond = 0.0
        if solver.is_exact or self.request.may_offload:
            free = self._free_solution(case, tables, below)
            if solver.is_exact and solver.promise_of(candidate, free.lower_bound) >= below:
                return None
            beyond = solver.beyond(case, tables, free)
            fits = free.memory + beyond <= room
            fits = fits and tables.host_of(free.choices) <= tables.host_room
            if solver.is_exact and fits:
                return solver.promised(case, tables, free, free=True, beyond=beyond)
            # A limit of memory can only make the optimum slower.
            if solver.is_exact and solver.least(candidate, free.lower_bound) >= below:
                return None
            # Host memory is offered only where memory is known to bind, as its choices make the
            # tables larger.
            if not fits and solver.binds(candidate, case.mode):
                tables = solver.offering(tables, candidate, case.mode)
            # A negative `beyond` says that the program needs less than its tables add up to.
            loosest = max(room, room - beyond)
            if solver.is_exact and solver.proves_too_slow(candidate, tables, loosest, below):
                return None
        return self.memory_bound.solve(case, tables, beyond)

    def _free_solution(self, case: Case, tables: Tables, below: float) -> Solution:
        """The optimum without a limit of memory; its bound tells of all modes of the candidate."""
        free = self.solver.free_solution(case.candidate, tables, below)
        self.free_bounds[case] = free.lower_bound
        return free

    # --- Programs. ---

    def play(self, solved: Solved, below: float = math.inf) -> list[Played]:
        """The programs of a case, the fastest first, up to `near` times `below` seconds.

        They differ in the share of the parameters' collectives that their tables take as hidden.
        Raises `Infeasible` where no program fits the memory.
        """
        staged = solved.candidate.stages > 1
        enough = EFFORT.near * below
        programs: list[Played] = []
        failures: list[Infeasible] = []
        for other in self._at_shares(solved):
            try:
                played = self._played(other, enough, below)
            except Infeasible as error:
                failures.append(error)
                continue
            # The share matters little to a pipeline: one far behind at one share is so at others.
            if played is None and staged:
                break
            if played is None:
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
                other = self.promise(replace(solved.case, hidden=share))
                # The same choices make the same program, but may lie on another front.
                if other is not None and (
                    self.memory_bound.on_fronts or other.solution.choices not in seen
                ):
                    seen.add(other.solution.choices)
                    yield other

    def _played(self, solved: Solved, below: float, best: float) -> Played | None:
        """The program of one solution; None where it takes `below` seconds or more.

        `best`: seconds of the incumbent. Whether slower programs fit the memory is not of interest.
        """
        if solved.candidate.stages > 1:
            return self._pipeline(solved, below)
        if self.memory_bound.on_fronts:
            if solved.free and not self._is_misjudged(solved, self.written_out.seconds(solved)):
                return self._alone(solved, below, best)
            try:
                return self._on_front(solved, solved.tables, below)
            except Infeasible as error:
                raise self._misfit(solved.candidate, error.minimum_memory) from None
        return self._alone(solved, below, best)

    def _misfit(self, candidate: Candidate, memory: float) -> Infeasible:
        """The error of a program of so many bytes a device, as bytes of all stages' tables."""
        needed = candidate.stages * (memory - self.solver.always)
        room = self.solver.room(candidate)
        return Infeasible(max(needed, math.nextafter(room, math.inf)), room)

    def _alone(self, solved: Solved, below: float, best: float) -> Played | None:
        """The program without stages of a folded solution, written out for the whole graph."""
        seconds = self.written_out.seconds(solved)
        if seconds >= below:
            return None
        if seconds >= best:
            return Played(solved=solved, seconds=seconds, limited=not solved.free)
        limit = self.solver.memory_limit(solved.candidate)
        draft = self.written_out.program(solved)
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

    def _on_front(self, solved: Solved, tables: Tables, below: float) -> Played | None:
        """The fastest program on the front of a case, as far as the tables let it be below."""
        ceiling = math.inf
        if below < math.inf:
            # The front is in seconds of the tables' sums, `below` in seconds of a step.
            ceiling = below / solved.seconds * solved.solution.cost
        front = self.memory_bound.front(solved.case, tables)
        best = front.best(ceiling=ceiling)
        if self._is_misjudged(solved, best.seconds):
            best = front.best(ceiling=ceiling, few=EFFORT.few)
        if best.seconds >= below:
            return None
        return Played(
            solved=replace(solved, tables=tables, solution=best.solution),
            seconds=best.seconds,
            limited=front.tightened,
        )

    @staticmethod
    def _is_misjudged(solved: Solved, seconds: float) -> bool:
        """Whether a program is slower than its tables say, so that the next of a front may do.

        Tables tell little of steps that mostly launch.
        """
        brief = solved.seconds < EFFORT.brief
        return brief and EFFORT.exposed * solved.seconds < seconds

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
        fronts = self.memory_bound.on_fronts
        if fronts and not solved.free:
            return self._on_front(solved, tables, below)
        try:
            program = self._cut_program(solved, tables, below)
        except Slower:
            return None
        if fronts and (program.tightened or self._is_misjudged(solved, program.seconds)):
            return self._on_front(solved, tables, below)
        if program.seconds >= below:
            return None
        part = program.parts[0]
        full = program.memory > EFFORT.plenty * self.solver.memory_limit(solved.candidate)
        return Played(
            solved=replace(solved, tables=part.tables, solution=part.solution),
            seconds=program.seconds,
            limited=full and program.tightened,
        )

    def _cut_program(self, solved: Solved, tables: Tables, below: float) -> StagedProgram:
        candidate = solved.candidate
        terms = Terms(
            request=self.quickly,
            schedule=self.solver.schedule_of(candidate, solved.mode, short=True),
            always=self.solver.always,
            expand=functools.partial(expand, self.folded),
        )
        return best_pipeline(
            [self.solver.group(candidate)],
            [tables],
            terms,
            solved=solved.solution if tables is solved.tables else None,
            too_slow=below,
        )
