"""A candidate of the outer search: its tables on the folded graph, its solution, and the step that this promises."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.costmodel.memory.peak import certain_bytes
from autopar.costmodel.step.pricing import MeshPrices
from autopar.order.schedules import in_flight
from autopar.search import Infeasible, Interrupted, Solution, nearly

from ..sharding.schedule import Schedule
from .bounds import Bounds
from .candidates import Candidate
from .filling import filled, on_front
from .folded_model import FoldedModel
from .fronts import FILLINGS, Front, Priced, price_alone, price_stages
from .memory_beyond_tables import bytes_beyond
from .multiplicities import Counts, Multiplicities
from .parameter_traffic import exposed_seconds, hideable
from .pipeline_parts import Slower
from .pipeline_search import Group, best_pipeline
from .request import Request
from .solved_candidate import CutSolution, Mode, Solved
from .solving import EXACT_METHOD, QUICK_METHOD
from .tables import Tables
from .too_slow import TooSlow
from .tuning import TUNING
from .unfolding import whole_seconds


class CandidateSolver:
    """The candidates of a request, each solved when it is asked for.

    `needed`: the bytes of the program whose solution's bound is in `bounds.free`. `left`: what an interrupted solution had found. `slow`:
    what the memory makes too slow.
    """

    def __init__(self, folded: FoldedModel, request: Request) -> None:
        self.folded, self.request = folded, request
        # Many solutions are cut for their order alone.
        self.quickly = replace(request, method=QUICK_METHOD) if request.method == EXACT_METHOD else request
        self.always = certain_bytes(folded.analysis(short=False))
        self.left: Solved | None = None
        self.bounds = Bounds(folded, request)
        self.needed: dict[Candidate, float] = {}
        self.binding: set[tuple[Candidate, Mode]] = set()
        self.slow = TooSlow()
        self.fronts: dict[tuple[Candidate, Mode, float, bool], Front] = {}

    # --- what a candidate is made of ---

    def modes(self, micro_batches: int) -> Iterator[Mode]:
        """Recompute and ZeRO, as far as they are not fixed; what costs least time first."""
        request, zeros = self.request, [1, 2, 3] if micro_batches > 1 else [1, 3]
        recomputes = ["none", "selective", "full"] if request.train and self.folded.runs else ["none"]
        for recompute in recomputes if request.recompute is None else [request.recompute]:
            for zero in (zeros if request.train else [1]) if request.zero is None else [request.zero]:
                yield Mode(zero=zero, recompute=recompute)

    def work(self, candidate: Candidate, mode: Mode, counts: Counts, *, short: bool) -> Multiplicities:
        """The multiplicities of a candidate, under the schedule that keeps least in flight."""
        stages, count, schedule = candidate.stages, candidate.micro_batches, self.bounds.thrifty(candidate.stages, candidate.micro_batches)
        passes = count + self.bounds.pipe(stages, count).bubble(schedule)
        early = self.bounds.early(stages, candidate.mesh)
        work = Multiplicities(
            counts=counts, passes=passes, accumulating=count > 1, zero=mode.zero, early=early.readers,
            in_flight=in_flight(schedule, 0, stages, count), segments=self.folded.segments(mode.recompute, short=short),
        )  # fmt: skip
        parameters, tensors = self.folded.parameters, self.folded.folding.graph.tensors
        return replace(work, hidden=hideable(self.prices(candidate), parameters, work, tensors, stages)) if self.request.train else work

    def group(self, candidate: Candidate) -> Group:
        """The devices of a candidate's stages."""
        cluster = candidate.cluster
        return Group(cluster=cluster, whole=cluster, start=0, stages=candidate.stages, mesh=candidate.mesh)

    def schedule(self, mode: Mode, micro_batches: int, prices: Sequence[MeshPrices], *, short: bool) -> Schedule:
        """What the runtime is told; of the meshes of several groups the one with the largest units decides."""
        return Schedule(
            micro_batches=micro_batches,
            recompute=self.folded.segments(mode.recompute, short=short),
            gathered="again" if mode.zero == 3 else "kept",
            accumulated="shards" if mode.zero == 2 else "whole",
            unit_bytes=max(one.unit_bytes for one in prices),
            types=self.request.types,
            reductions=self.request.reductions,
        )

    def cut(self, solved: Solved, *, below: float = math.inf) -> Solved:
        """A solution with the seconds of its program, a pipeline with those of its best cuts; raises `Infeasible` where no cut fits.

        A pipeline of which every cut takes `below` seconds or more is left uncut; on fronts nothing that the tables put there is cut.
        """
        candidate, tables, solution = solved.candidate, solved.tables, solved.solution
        if solved.exact:
            return solved
        if candidate.stages == 1:
            schedule = self.schedule(solved.mode, candidate.micro_batches, [tables.prices], short=False)
            whole = self.folded.analysis(short=False, micro_batches=candidate.micro_batches)
            return replace(solved, seconds=whole_seconds(tables, solution, self.folded.folding, whole, schedule), exact=True)
        try:
            found = self._staged(solved, below)
        except Slower as slower:
            return replace(solved, seconds=max(solved.seconds, slower.seconds), uncut=True)
        if isinstance(found, Infeasible):
            raise Infeasible(candidate.stages * (found.minimum_memory - self.always), self.room(candidate))
        full = found.memory > TUNING.plenty * self.memory_limit(candidate)
        # All stages together may have room where one of them has not: other modes may be faster then.
        free = solved.free and not (full and (found.tightened or found.seconds > TUNING.short * solved.seconds))
        return replace(solved, seconds=found.seconds, tables=found.tables, solution=found.solution, free=free, exact=True, uncut=False)

    def _staged(self, solved: Solved, below: float) -> CutSolution | Infeasible:
        """The best cuts of a candidate, with host memory where that helps, or why there are none; raises `Slower`."""
        candidate, tables = solved.candidate, solved.tables
        found = self._cut(solved, tables, below, solved.solution)
        # What fits all stages together may not fit each of them: host memory may help there, too.
        short = isinstance(found, Infeasible) or (found.tightened and (self.on_fronts or found.seconds > TUNING.promised * solved.seconds))
        if short and self.binds(candidate, solved.mode):
            below = below if self.on_fronts or isinstance(found, Infeasible) else math.inf
            other = self._cut(solved, self.offering(tables, candidate, solved.mode), below)
            found = min((one for one in (found, other) if isinstance(one, CutSolution)), key=lambda one: one.seconds, default=found)
        return found

    def _cut(self, solved: Solved, tables: Tables, below: float, solution: Solution | None = None) -> CutSolution | Infeasible:
        """The best cuts of a candidate on its tables, of which the first solution may be known; or why there are none."""
        candidate = solved.candidate
        try:
            if self.on_fronts:
                first = solution if solved.free else None
                front = self.front(candidate, solved.mode, tables, solved.hidden, first)
                best = front.best(ceiling=below / solved.seconds * solved.solution.cost)
                return CutSolution(
                    tables=tables, solution=best.solution, seconds=best.seconds, memory=best.memory, tightened=front.tightened
                )  # fmt: skip
            schedule = self.schedule(solved.mode, candidate.micro_batches, [tables.prices], short=True)
            found = best_pipeline(
                [self.group(candidate)], lambda _: tables, schedule, self.quickly, always=self.always, too_slow=below,
                expand=self.folded.expand, solved=solution,
            )  # fmt: skip
            part, step = found.parts[0], found.pipeline.step
            return CutSolution(tables=part.tables, solution=part.solution, seconds=step, memory=found.memory, tightened=found.tightened)
        except Infeasible as error:
            return error

    # --- the solutions that depend on no limit ---

    @property
    def on_fronts(self) -> bool:
        """Whether what the memory limits is looked for on the fronts of candidates: of small models whose steps are brief, as each of many
        programs is made, and as of longer steps the tables tell enough."""
        devices = self.request.cluster.devices
        brief = devices <= TUNING.fronts and self.bounds.least_seconds(devices) < TUNING.brief
        return brief and self.folded.is_small and self.request.method == EXACT_METHOD

    def front(self, candidate: Candidate, mode: Mode, tables: Tables, hidden: float, first: Solution | None = None) -> Front:
        """The front of a candidate's tables; `first`: their optimum, where it is known."""
        key, count = (candidate, mode, hidden, any(v.host is not None for v in tables.variables)), candidate.micro_batches
        if key not in self.fronts:
            memory_limit, schedule = self.memory_limit(candidate), self.schedule(mode, count, [tables.prices], short=candidate.stages > 1)
            if candidate.stages == 1:
                price = price_alone(self.folded, count, schedule, memory_limit)
            else:
                price = price_stages(self.folded, self.group(candidate), schedule, self.request, self.always)
            self.fronts[key] = Front(tables, price, memory_limit, first, FILLINGS if candidate.stages == 1 else FILLINGS // 2)
        return self.fronts[key]

    def of_program(self, priced: Priced, candidate: Candidate, mode: Mode, tables: Tables, hidden: float) -> Solved:
        """A solution of a front as a solved candidate, with the step and the memory of its program."""
        beyond = priced.memory - self.always - priced.solution.memory if candidate.stages == 1 else 0.0
        solved = self.as_solved(candidate, mode, tables, priced.solution, beyond=beyond, hidden=hidden)
        return replace(solved, seconds=priced.seconds, exact=True)

    def memory_limit(self, candidate: Candidate) -> float:
        """Bytes that a plan may fill on a device of a candidate: fewer ranks of one host have more of its memory each."""
        return self.request.memory_limit_on(candidate.cluster)

    def room(self, candidate: Candidate) -> float:
        """Bytes that the tables of all stages may fill together."""
        return candidate.stages * max(self.memory_limit(candidate) - self.always, 0.0)

    def solve(
        self, candidate: Candidate, mode: Mode, *, below: float = math.inf, far: float = math.inf, hidden: float | None = None
    ) -> Solved | None:
        """The best solution of a candidate, at several prices of what is hidden (or that one); see `_solve`.

        A step is X + max(0, G - B), G the collectives of parameters and B the computation that can hide them: the maximum over l in [0, 1]
        of X + l (G - B). The least l is tried first; where it leaves more than can be hidden, larger ones are.
        """
        best = self._solve(candidate, mode, below, self.hides(candidate, mode) if hidden is None else hidden, far)
        if best is None or candidate.stages > 1 or not self._overflows(best):
            return best
        share = best.hidden
        for part in TUNING.seen:
            with contextlib.suppress(Infeasible):
                other = self._solve(candidate, mode, best.seconds if self.on_fronts else math.inf, part * share)
                if other is not None and other.seconds < best.seconds:
                    best = other
        return best

    def hides(self, candidate: Candidate, mode: Mode) -> float:
        """The share of the collectives of parameters that a step, or its stages, can hide."""
        return self.work(candidate, mode, self.folded.counts, short=True).hidden

    def prices(self, candidate: Candidate) -> MeshPrices:
        """The prices on a candidate's mesh."""
        return self.folded.prices(candidate.cluster, candidate.mesh, candidate.stages)

    def _overflows(self, solved: Solved) -> bool:
        """Whether there is more of the collectives of parameters than their share that is taken to be hidden."""
        return solved.hidden > 0 and solved.seconds > solved.solution.cost * (1 + TUNING.certain)

    def _solve(self, candidate: Candidate, mode: Mode, below: float, hidden: float, far: float = math.inf) -> Solved | None:
        """The solution of a candidate within the memory; None where, without a limit, it takes `below` seconds or more.

        Raises `Infeasible`, with no more than a bound of the memory that would do where others are known (where within the memory it takes
        `far` seconds or more, too), and `NoAssignment`.
        """
        tables, room, exact = self.folded_tables(candidate, mode, hidden), self.room(candidate), self.request.method == EXACT_METHOD
        beyond = 0.0
        if below < math.inf and (least := tables.least_kept()) > room:
            raise Infeasible(least, room)
        try:
            if exact or self.request.may_offload:
                close = TUNING.ranked if candidate.stages == 1 else TUNING.bounded
                free = nearly(tables.graph, close=close, enough=below / self._least(candidate, 1.0), room=room, loose=TUNING.bounded)
                beyond = self.beyond(candidate, mode, tables, free)
                if mode == next(self.modes(candidate.micro_batches)):
                    self.bounds.free[candidate], self.needed[candidate] = free.lower_bound, free.memory + beyond
                fits = free.memory + beyond <= room and tables.host_of(free.choices) <= tables.host_room
                if fits and exact:
                    return self.as_solved(candidate, mode, tables, free, free=True, beyond=beyond, hidden=hidden)
                if exact and self._least(candidate, free.lower_bound) >= below:
                    return None
                if not fits and self.binds(candidate, mode):
                    tables = self.offering(tables, candidate, mode)
                if exact and self.slow.proves(candidate, tables.graph, max(room, room - beyond), self._least(candidate, 1.0), far):
                    raise Infeasible(math.nextafter(room, math.inf), room)
            if self.on_fronts:
                return on_front(self, candidate, mode, tables, hidden, below)
            return filled(self, candidate, mode, tables, hidden, beyond)
        except Interrupted as interrupt:
            if interrupt.best is not None:
                self.left = self.as_solved(candidate, mode, tables, interrupt.best, hidden=hidden)
            raise

    def beyond(self, candidate: Candidate, mode: Mode, tables: Tables, solution: Solution) -> float:
        """What a program without stages needs beyond its tables; 0 where memory is no question, and of stages, which are cut by it."""
        room = self.room(candidate)
        if candidate.stages > 1 or solution.memory < (TUNING.surely if self.folded.is_small else TUNING.plenty) * room:
            return 0.0
        schedule = self.schedule(mode, candidate.micro_batches, [tables.prices], short=True)
        return bytes_beyond(tables, solution, schedule, self.folded.counts, room)

    def folded_tables(self, candidate: Candidate, mode: Mode, hidden: float) -> Tables:
        """The tables of a candidate, on the folded graph."""
        work = replace(self.work(candidate, mode, self.folded.counts, short=True), hidden=hidden)
        return self.offering(self.plain_tables(candidate, work), candidate, mode)

    def plain_tables(self, candidate: Candidate, work: Multiplicities) -> Tables:
        """The tables of a candidate on the folded graph, without host memory."""
        analysis = self.folded.analysis(short=True, micro_batches=candidate.micro_batches)
        return self.bounds.tables(analysis, candidate.cluster.devices, candidate.stages, candidate.mesh, work)

    def offering(self, tables: Tables, candidate: Candidate, mode: Mode) -> Tables:
        """Tables of a candidate with the choices of host memory, if they are to have them."""
        return self.request.offering(tables, candidate.stages, binding=(candidate, mode) in self.binding)

    def binds(self, candidate: Candidate, mode: Mode) -> bool:
        """Note that the memory binds a candidate, so that it is offered host memory; whether it was not before."""
        new = (candidate, mode) not in self.binding
        self.binding.add((candidate, mode))
        return new and self.request.may_offload

    def as_solved(
        self, candidate: Candidate, mode: Mode, tables: Tables, solution: Solution, *, free: bool = False, beyond: float = 0.0,
        hidden: float = 0.0,
    ) -> Solved:  # fmt: skip
        """A solution of tables on the folded graph as a solved candidate, with the step that it promises."""
        seconds, short, stages, count = solution.cost, False, candidate.stages, candidate.micro_batches
        work = self.work(candidate, mode, self.folded.counts, short=True)
        if stages > 1:
            pipe, schedules = self.bounds.pipe(stages, count), self.bounds.schedules(stages, count)
            expected = pipe.expected(tables, solution, work, schedules, self.room(candidate))
            seconds, short = expected.seconds * self.folded.imbalance(tables, solution, stages), expected.short
        elif self.request.train:
            seconds += exposed_seconds(tables, solution, replace(work, hidden=hidden))
        return Solved(
            candidate=candidate, mode=mode, tables=tables, solution=solution, seconds=seconds, beyond=beyond, hidden=hidden,
            bound=self._least(candidate, solution.lower_bound), free=free and not short,
        )  # fmt: skip

    def _least(self, candidate: Candidate, bound: float) -> float:
        """What a bound of the tables' sum is for a step, under the schedule that waits least."""
        stages, count = candidate.stages, candidate.micro_batches
        waited = self.bounds.pipe(stages, count).bubble(self.bounds.thrifty(stages, count))
        return bound / stages * (count + self.bounds.least_bubble(stages, count)) / (count + waited)
