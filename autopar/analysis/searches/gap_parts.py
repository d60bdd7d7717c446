"""The parts of a plan's gap: what its bound leaves out, in seconds that add up to the whole gap.

A bound is a chain of relaxations. At the plan's own candidate (stages, mesh, micro-batches, mode)
they are closed one after the other, and the seconds that each adds are its part:

    step - bound = sum of parts        part i = min(max(V_i, V_i-1), V_7) - V_i-1

    V_0   the bound of the plan, the least of all candidates
    V_1   the bound of its own candidate in its own mode, without a limit of memory
    V_2   the same within the memory; with stages it is part of V_3
    V_3   tables that count the passes of equal stages under the plan's schedule, within the memory
    V_4   the same with the parameters' messages, of which the search takes a share as hidden
    V_5   the same with the plan's own strategies and storage
    V_6   the same with exchanges of experts that may run under other computation, where the plan's
          passes are merged or have something beside them
    V_7   the step of the plan
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.order.schedules import in_flight
from autopar.plan import Plan
from autopar.planning.bounds.forced_recompute import least_used
from autopar.planning.bounds.hidden_exchanges import HiddenExchanges
from autopar.planning.bounds.with_stages import PipelineBounds
from autopar.planning.bounds.within_memory import least_within
from autopar.planning.model.counts import Counts
from autopar.planning.model.effort import EFFORT
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.pins import hosted_by, reuse
from autopar.planning.model.recompute import RECOMPUTES
from autopar.planning.model.request import Request
from autopar.planning.outer_search.bound_within import loosest
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode
from autopar.planning.space.multiplicities import Multiplicities
from autopar.planning.tables.requested import requested_tables, with_host_choices
from autopar.planning.tables.tables import Known, Tables
from autopar.schemes import stages_of
from autopar.search import NoAssignment, bound_within, least_memory, nearly, solve
from autopar.sharding.analysis import Analysis
from autopar.sharding.schedule import zero_stage

CANDIDATE = "candidate"
MEMORY = "memory"
PASSES = "passes"
HIDDEN = "hidden"
CHOICES = "choices"
EXCHANGES = "exchanges"
PROGRAM = "program"
ROUNDING = 1e-12
"""The share of a bound up to which another one is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapParts:
    """The step and the bound of a plan, and the `seconds` between them by part.

    `held_by`: the candidate that holds the bound ("" if the plan does not tell it). Of stages on
    unlike meshes the parts are not told apart.
    """

    step: float
    bound: float
    held_by: str
    seconds: dict[str, float]


def gap_parts(
    plan: Plan, analysis: Analysis, cluster: Cluster, *, memory: float | None = None
) -> GapParts:
    """The parts of a plan's gap; `memory`: the bytes of a device that it was planned within."""
    made = plan.provenance
    step = plan.predicted.step
    levels: dict[str, float] = {}
    if len({stage.mesh for stage in plan.stages}) <= 1:
        with contextlib.suppress(NoAssignment):
            levels = dict(_Levels(plan, analysis, cluster, memory).values())
    seconds = {}
    reached = made.lower_bound
    for part, value in [*levels.items(), (PROGRAM, step)]:
        # A level that is equal but for rounding closes nothing.
        same = math.isclose(value, reached, rel_tol=ROUNDING)
        closed = reached if same else min(max(value, reached), step)
        seconds[part] = closed - reached
        reached = closed
    return GapParts(step=step, bound=made.lower_bound, held_by=made.bound_of, seconds=seconds)


class _Levels:
    """The values V_1 to V_6 of a plan."""

    def __init__(
        self, plan: Plan, analysis: Analysis, cluster: Cluster, memory: float | None
    ) -> None:
        self.plan = plan
        schedule = plan.schedule
        used = cluster.sized(plan.devices)
        self.request = Request(
            cluster=used,
            train=analysis.train,
            optimizer=plan.model.optimizer,
            memory=memory,
            types=schedule.types,
            hosted=hosted_by(plan),
        )
        self.graph = analysis.graph
        folded = FoldedModel(analysis.graph, train=analysis.train)
        self.candidate = Candidate(
            cluster=used,
            stages=stages_of(plan),
            mesh=plan.mesh_,
            micro_batches=schedule.micro_batches,
        )
        exchanges = HiddenExchanges(folded, self.request)
        self.hiding = schedule.overlap_experts or exchanges.certain(self.candidate)
        self.solver = CandidateSolver(folded, self.request, hiding=self.hiding)
        self.pipelines = PipelineBounds(self.solver.bounds)
        self.mode = Mode(
            zero=zero_stage(schedule.gathered, schedule.accumulated), recompute=self._recompute()
        )

    def _recompute(self) -> str:
        """The mode of recompute that makes the plan's segments; "none", which does less, else."""
        segments = self.plan.schedule.recompute
        folded = self.solver.folded
        return next(
            (mode for mode in RECOMPUTES if folded.segments(mode, short=False) == segments), "none"
        )

    def values(self) -> Iterator[tuple[str, float]]:
        """The values by what is closed for them."""
        stages = self.candidate.stages
        room = self.solver.room(self.candidate)
        yield from self._bounds(room) if stages == 1 else self._bounds_of_stages()
        work = self.solver.work(self.candidate, self.mode, self.solver.folded.counts, short=True)
        if stages > 1:
            work = self._of_schedule(work)
            room = room / least_used(self.mode.recompute)
            yield PASSES, self._within(replace(work, once=0.0), room)
        yield HIDDEN, self._within(work, room)
        tables = self._as_planned(work)
        if self.hiding:
            yield CHOICES, solve(self._left_out(tables, work).graph).cost / stages
        yield EXCHANGES if self.hiding else CHOICES, solve(tables.graph).cost / stages

    @property
    def _schedule(self) -> tuple[str, int]:
        return self.plan.schedule.pipeline, self.plan.schedule.interleave

    def _of_schedule(self, work: Multiplicities) -> Multiplicities:
        """The work under the plan's own schedule, with the mean of what stages have in flight."""
        name, chunks = self._schedule
        stages = self.candidate.stages
        count = self.candidate.micro_batches
        flying = [in_flight(name, stage, stages, count, chunks) for stage in range(stages)]
        bubble = self.solver.bounds.pipe(stages, count).bubble(name, chunks)
        return replace(work, passes=count + bubble, in_flight=math.fsum(flying) / stages)

    def _bounds(self, room: float) -> Iterator[tuple[str, float]]:
        """The bounds of a candidate without stages, without a limit of memory and within it."""
        before = self.solver.bounds.early(1, self.candidate.mesh).before
        every = functools.partial(loosest, self.solver, self.candidate, self.mode)
        free = nearly(every(0.0).graph, close=EFFORT.bounded).lower_bound
        yield CANDIDATE, free - before
        within = least_within([every], room, 0.0, math.inf)
        # Programs may need less than their tables add up to, so that the plan's own may not fit.
        yield MEMORY, (within if within < math.inf else free) - before

    def _bounds_of_stages(self) -> Iterator[tuple[str, float]]:
        """The bound of a candidate with stages, without a limit of memory."""
        schedules = (self._schedule,)
        yield CANDIDATE, self.pipelines.free(self.candidate, schedules, self.mode.recompute)

    def _within(self, work: Multiplicities, room: float) -> float:
        """Seconds of a step that the tables' sum has at the least, within some bytes."""
        tables = self.solver.plain_tables(self.candidate, work)
        tables = with_host_choices(self.request, tables, self.candidate.stages)
        least = tables.graph.memory_of(least_memory(tables.graph))
        return bound_within(tables.graph, max(room, least)).bound / self.candidate.stages

    def _left_out(self, tables: Tables, work: Multiplicities) -> Tables:
        """Tables of the plan's own choices without the exchanges that may hide."""
        whole = FoldedModel(self.graph, train=self.request.train, folded=False)
        work = replace(work, counts=Counts(), segments=self.plan.schedule.recompute)
        return HiddenExchanges(whole, self.request).left_out(
            tables,
            work,
            stages=self.candidate.stages,
            several=self.candidate.micro_batches > 1,
            known=Known(),
        )

    def _as_planned(self, work: Multiplicities) -> Tables:
        """Tables of the plan's own strategies and storage."""
        count = self.candidate.micro_batches
        folded = FoldedModel(self.graph, train=self.request.train, folded=False)
        pins, _ = reuse(self.plan, folded.analysis(short=False))
        request = replace(self.request, limits=pins)
        tables = requested_tables(
            request,
            folded.analysis(short=False, micro_batches=count),
            self.solver.prices(self.candidate),
            replace(work, counts=Counts(), segments=self.plan.schedule.recompute),
            whole=False,
        )
        return with_host_choices(request, tables, self.candidate.stages)
