"""A candidate of the outer search: its tables on the folded graph, its solution, and the step that
the tables promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.costmodel.frameworks import OWN
from autopar.costmodel.memory.states import certain_bytes
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.order.schedules import in_flight
from autopar.planning.bounds.by_mesh import Bounds
from autopar.planning.model.counts import Counts, Segments
from autopar.planning.model.effort import EFFORT
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.solve.peak_beyond_tables import bytes_beyond
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.solve.within_limits import EXACT_METHOD
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode, recomputes_of
from autopar.planning.space.multiplicities import Multiplicities
from autopar.planning.stages.estimate import StepEstimate, Sums, sums_of
from autopar.planning.stages.parts import Group
from autopar.planning.tables.parameters.traffic import exposed_seconds, hideable
from autopar.planning.tables.requested import with_host_choices
from autopar.planning.tables.tables import Tables
from autopar.search import Solution, bound_within, nearly
from autopar.sharding.mesh import Mesh
from autopar.sharding.schedule import Schedule


class CandidateSolver:
    """The candidates of a request: their tables, and the optimum of these without a memory limit.

    `always`: bytes of a device that no choice changes, such as inputs and constants. `binding`: the
    candidates and modes that memory binds, so that host memory is offered to them. `hiding`: see
    `Bounds`.
    """

    def __init__(self, folded: FoldedModel, request: Request, *, hiding: bool = False) -> None:
        self.folded = folded
        self.request = request
        self.always = certain_bytes(folded.analysis(short=False))
        self.bounds = Bounds(folded, request, hiding=hiding)
        self.binding: set[tuple[Candidate, Mode]] = set()
        # Of a byte, in seconds: the last one on each mesh.
        self._prices: dict[tuple[int, int, Mesh], float] = {}

    # --- The parts of a candidate. ---

    def modes(self) -> Iterator[Mode]:
        """Recompute and ZeRO, as far as they are not fixed; the one of least time comes first.

        ZeRO 0 is left out unless it is asked for, as ZeRO 1 may store parameters whole, too:
        its programs differ only in the copies of gathers (see `stored_whole`).
        """
        request = self.request
        zeros = [1, 2, 3] if request.train else [1]
        if request.space is not None and request.train:
            zeros = [zero for zero in zeros if zero in request.space.zeros] or [0]
        if request.zero is not None:
            zeros = [request.zero]
        for recompute in recomputes_of(self.folded, request):
            for zero in zeros:
                yield Mode(zero=zero, recompute=recompute)

    def stored_whole(self, mode: Mode) -> Mode | None:
        """The mode with all parameters stored whole, where the request leaves that open."""
        request = self.request
        if request.zero is not None or not request.train:
            return None
        zeros = (0, 1, 2, 3) if request.space is None else request.space.zeros
        first = next((zero for zero in zeros if zero), None)
        return replace(mode, zero=0) if mode.zero == first and 0 in zeros else None

    def work(
        self, candidate: Candidate, mode: Mode, counts: Counts, *, short: bool
    ) -> Multiplicities:
        """The multiplicities of a candidate, under the schedule that keeps least in flight."""
        stages = candidate.stages
        count = candidate.micro_batches
        schedule = self.bounds.thrifty(stages, count)
        work = Multiplicities(
            counts=counts,
            passes=count + self.bounds.pipe(stages, count).bubble(schedule),
            accumulating=count > 1,
            zero=mode.zero,
            early=self.bounds.early(stages, candidate.mesh).readers,
            in_flight=in_flight(schedule, 0, stages, count),
            segments=self.segments(mode, short=short),
        )
        if not self.request.train:
            return work
        parameters = self.folded.parameters
        tensors = self.folded.folding.graph.tensors
        hidden = hideable(self.prices(candidate), parameters, work, tensors, stages)
        return replace(work, hidden=hidden)

    def hides(self, candidate: Candidate, mode: Mode) -> float:
        """The largest share of the parameters' collectives that a step, or its stages, can hide."""
        return self.work(candidate, mode, self.folded.counts, short=True).hidden

    def segments(self, mode: Mode, *, short: bool) -> Segments:
        """The groups that a mode recomputes, as the framework at hand obeys it."""
        others = self.request.cluster.framework.name != OWN
        return self.folded.segments(mode.recompute, short=short, all_named=others)

    def group(self, candidate: Candidate) -> Group:
        """The devices of a candidate's stages."""
        cluster = candidate.cluster
        return Group(
            cluster=cluster, whole=cluster, start=0, stages=candidate.stages, mesh=candidate.mesh
        )

    def schedule(
        self, mode: Mode, micro_batches: int, prices: Sequence[MeshPrices], *, short: bool
    ) -> Schedule:
        """The schedule inside a stage; of several groups' meshes, that of largest units decides."""
        return Schedule(
            micro_batches=micro_batches,
            recompute=self.segments(mode, short=short),
            gathered="per_pass" if mode.zero == 3 else "per_step",
            accumulated="shards" if mode.zero == 2 else "whole",
            unit_bytes=max(one.unit_bytes for one in prices),
            types=self.request.types,
            reductions=self.request.reductions,
            overlap_experts=bool(self.request.overlap_experts),
        )

    def schedule_of(self, candidate: Candidate, mode: Mode, *, short: bool) -> Schedule:
        """The schedule inside a stage of a candidate."""
        return self.schedule(mode, candidate.micro_batches, [self.prices(candidate)], short=short)

    def prices(self, candidate: Candidate) -> MeshPrices:
        """The prices on a candidate's mesh."""
        return self.folded.prices(candidate.cluster, candidate.mesh, candidate.stages)

    def memory_limit(self, candidate: Candidate) -> float:
        """Bytes that a plan may fill on a device: fewer ranks of one host have more of it each."""
        return self.request.memory_limit_on(candidate.cluster)

    def room(self, candidate: Candidate) -> float:
        """Bytes that the tables of all stages may fill together."""
        return candidate.stages * max(self.memory_limit(candidate) - self.always, 0.0)

    # --- Tables. ---

    def case(self, candidate: Candidate, mode: Mode) -> Case:
        """A candidate in a mode, with the most of its parameters' collectives hidden."""
        return Case(candidate=candidate, mode=mode, hidden=self.hides(candidate, mode))

    def tables(self, case: Case) -> Tables:
        """The tables of a case on the folded graph."""
        return self.tables_within(case, binding=self.is_bound(case))

    def tables_within(self, case: Case, *, binding: bool) -> Tables:
        """The tables of a case; `binding`: memory binds it, so that they may offer host memory."""
        candidate = case.candidate
        work = self.work(candidate, case.mode, self.folded.counts, short=True)
        plain = self.plain_tables(candidate, replace(work, hidden=case.hidden))
        return with_host_choices(self.request, plain, candidate.stages, binding=binding)

    def least_saved(self, case: Case) -> float:
        """Bytes of all stages that operators save in a case, whatever is chosen."""
        candidate = case.candidate
        # The hidden share changes no bytes, but the tables of the case are these.
        work = self.work(candidate, case.mode, self.folded.counts, short=True)
        return self.bounds.least_saved(
            self.folded.analysis(short=True, micro_batches=candidate.micro_batches),
            candidate.cluster.devices,
            candidate.stages,
            candidate.mesh,
            replace(work, hidden=case.hidden),
        )

    def plain_tables(self, candidate: Candidate, work: Multiplicities) -> Tables:
        """The tables of a candidate on the folded graph, without choices of host memory."""
        analysis = self.folded.analysis(short=True, micro_batches=candidate.micro_batches)
        devices = candidate.cluster.devices
        return self.bounds.tables(analysis, devices, candidate.stages, candidate.mesh, work)

    def offering(self, tables: Tables, candidate: Candidate, mode: Mode) -> Tables:
        """Tables of a candidate with choices of host memory, where memory binds it."""
        binding = (candidate, mode) in self.binding
        return with_host_choices(self.request, tables, candidate.stages, binding=binding)

    def is_bound(self, case: Case) -> bool:
        """Whether memory is known to bind a case."""
        return (case.candidate, case.mode) in self.binding

    def binds(self, candidate: Candidate, mode: Mode) -> bool:
        """Note that memory binds a candidate; whether host memory is newly offered by that."""
        new = (candidate, mode) not in self.binding
        self.binding.add((candidate, mode))
        return new and self.request.may_offload

    # --- Solutions. ---

    def recomputed(self, candidate: Candidate, mode: Mode) -> float:
        """Seconds of a step that a mode's recompute costs at the least: the arithmetic's share."""
        # At best all devices share the repeated work evenly.
        return self.bounds.recompute.seconds(mode.recompute) / candidate.devices

    @property
    def is_exact(self) -> bool:
        """Whether the request's method solves tables without a limit exactly."""
        return self.request.search == EXACT_METHOD

    def free_solution(self, candidate: Candidate, tables: Tables, below: float) -> Solution:
        """The optimum of tables without a limit of memory; close, if it takes `below` or more."""
        return nearly(tables.graph, close=EFFORT.bounded, enough=self.enough(candidate, below))

    def enough(self, candidate: Candidate, below: float) -> float:
        """The tables' sum with which a step takes `below` seconds."""
        # `least` is linear in its bound, so that this division is its inverse.
        return below / self.least(candidate, 1.0)

    def may_exceed(self, candidate: Candidate, solution: Solution) -> bool:
        """Whether a program may need bytes beyond the sum of its tables that matter."""
        # Stages are cut by their own memory.
        alone = candidate.stages == 1
        return alone and solution.memory >= EFFORT.plenty * self.room(candidate)

    def beyond(self, case: Case, tables: Tables, solution: Solution) -> float:
        """Bytes that a program without stages needs beyond the sum of its tables.

        0 where these do not matter.
        """
        candidate = case.candidate
        if not self.may_exceed(candidate, solution):
            return 0.0
        schedule = self.schedule_of(candidate, case.mode, short=True)
        return bytes_beyond(tables, solution, schedule, self.folded.counts, self.room(candidate))

    def promised(
        self, case: Case, tables: Tables, solution: Solution, *, beyond: float = 0.0
    ) -> Solved:
        """A solution within the memory with the step that its tables promise."""
        return Solved(
            case=case,
            made=lambda: tables,
            solution=solution,
            seconds=self.step_of(case, tables, solution).seconds,
            promise=self.promise_of(case.candidate, solution.lower_bound),
            beyond=beyond,
        )

    def step_of(self, case: Case, tables: Tables, solution: Solution) -> StepEstimate:
        """The step that a solution's tables add up to, and whether its schedule lacks memory."""
        return self.step_within(case, solution, self.sums_of(case, tables, solution))

    def sums_of(self, case: Case, tables: Tables, solution: Solution) -> Sums:
        """The sums of a solution's tables of which its step is made, whatever the memory."""
        work = self.work(case.candidate, case.mode, self.folded.counts, short=True)
        if case.candidate.stages > 1:
            return sums_of(tables, solution, work)
        exposed = 0.0
        if self.request.train:
            exposed = exposed_seconds(tables, solution, replace(work, hidden=case.hidden))
        return Sums(each=0.0, once=solution.cost + exposed, saved=0.0, stored=solution.memory)

    def step_within(self, case: Case, solution: Solution, sums: Sums) -> StepEstimate:
        """The step of a solution with such sums, and whether its schedule lacks memory."""
        candidate = case.candidate
        stages = candidate.stages
        count = candidate.micro_batches
        if stages == 1:
            return StepEstimate(seconds=sums.once, short=False)
        schedules = self.bounds.schedules(stages, count)
        pipe = self.bounds.pipe(stages, count)
        return pipe.expected(sums, solution, schedules, self.room(candidate))

    def promise_of(self, candidate: Candidate, bound: float) -> float:
        """Seconds that a program hardly undercuts, from a bound of the tables' sum."""
        return self.hardly_undercut(candidate, self.least(candidate, bound))

    @staticmethod
    def hardly_undercut(candidate: Candidate, bound: float) -> float:
        """Seconds that a program hardly undercuts, from a bound of the tables' step."""
        return bound if candidate.stages > 1 else (1 - EFFORT.margin) * bound

    def proves_too_slow(
        self, candidate: Candidate, tables: Tables, room: float, below: float
    ) -> bool:
        """Whether nothing within `room` bytes takes less than `below` seconds a step."""
        if below == math.inf:
            return False
        enough = self.enough(candidate, below)
        # The best price is mostly near that of the last candidate on the same mesh.
        price = self._prices.get(candidate.place, 0.0)
        near = bound_within(tables.graph, room, price=price, enough=enough)
        self._prices[candidate.place] = near.price
        return near.bound >= enough

    def least(self, candidate: Candidate, bound: float) -> float:
        """Seconds of a step from a bound of the tables' sum, under the schedule that waits least.

        step >= bound / p * (m + b_least) / (m + b_thrifty)
        """
        stages = candidate.stages
        count = candidate.micro_batches
        waited = self.bounds.pipe(stages, count).bubble(self.bounds.thrifty(stages, count))
        passes = (count + self.bounds.least_bubble(stages, count)) / (count + waited)
        return bound / stages * passes
