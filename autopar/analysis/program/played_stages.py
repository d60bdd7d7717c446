"""The passes of a plan's stages as they are simulated, with each stage's work once a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.costmodel import Cluster
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.costmodel.step.pipeline_simulation import PipelineRun, simulate
from autopar.costmodel.step.shared_cores import shared_seconds
from autopar.errors import PlanError
from autopar.order.execution import execution
from autopar.order.pipeline import neighbours, pipeline_order
from autopar.order.playing import Orders
from autopar.order.times import Floats, Times
from autopar.plan import Plan
from autopar.planning.stages.operator_costs import OperatorCosts, operator_costs
from autopar.planning.stages.stage import Place, message_seconds
from autopar.planning.tables.parameters.traffic import Once, once_seconds, units_once
from autopar.sharding.analysis import Analysis
from autopar.sharding.micro_batches import split_batch
from autopar.sharding.schedule import Schedule

from .account import has_account


@dataclass(frozen=True, kw_only=True, eq=False)
class PlayedStages:
    """The stages of a plan in a step; chunk k begins with operator `starts[k]`."""

    plan: Plan
    cluster: Cluster
    figures: OperatorCosts
    starts: Sequence[int]
    orders: Orders

    @property
    def stages(self) -> int:
        """The number of stages, each of which has one chunk or more."""
        return len(self.orders)

    def passes(self, values: Floats) -> list[float]:
        """The sums of operators' seconds in a pass of each stage, with the host's own."""
        visits = len(self.starts) // self.stages * self.figures.visit
        return [seconds + visits for seconds in self.by_stage(values)]

    def by_stage(self, values: Floats) -> list[float]:
        """The sums of operators' values over each stage."""
        sums = np.add.reduceat(values, self.starts)
        return [math.fsum(sums[stage :: self.stages]) for stage in range(self.stages)]

    @cached_property
    def times(self) -> Times:
        """Seconds of a micro-batch on every stage."""
        figures = self.figures
        size = self.plan.mesh_.devices
        chunks = len(self.starts)
        places = [
            Place(cluster=self.cluster, start=stage * size, count=size)
            for stage in range(self.stages)
        ]
        handed = [
            float(figures.handed[self.starts[number + 1]]) if number + 1 < chunks else 0.0
            for number in range(self.stages)
        ]
        forward, backward = map(self.passes, (figures.forward, figures.backward))
        weight, hidden = map(self.by_stage, (figures.weight, figures.hidden))
        sends = message_seconds(places, handed)
        chunks = self.plan.schedule.interleave
        overlap = self.cluster.framework.habits.overlaps_sends(chunks)
        return Times.of(forward, backward, weight, sends, hidden=hidden, overlap=overlap)

    @cached_property
    def run(self) -> PipelineRun:
        """The simulated passes of all stages."""
        return simulate(self.orders, self.times, self.plan.schedule.interleave)

    @cached_property
    def unsent(self) -> PipelineRun:
        """The passes as they were if messages took no time."""
        alone = replace(self.times, send=np.zeros(self.stages))
        return simulate(self.orders, alone, self.plan.schedule.interleave)

    def _updates(self) -> list[float]:
        """Seconds of the optimizer on each stage; of a chunk, whose owners share its matrices."""
        ends = [*self.starts[1:], len(self.figures.update)]
        uneven = [self.figures.uneven(*chunk) for chunk in zip(self.starts, ends, strict=True)]
        return [
            seconds + math.fsum(uneven[stage :: self.stages])
            for stage, seconds in enumerate(self.by_stage(self.figures.update))
        ]

    @cached_property
    def once(self) -> tuple[Once, ...]:
        """The work of each stage once a step."""
        figures = self.figures
        unit_bytes = self.plan.schedule.unit_bytes
        forward, backward = map(self.passes, (figures.forward, figures.backward))
        sums = map(self.by_stage, (figures.gather, figures.once - figures.gather))
        units = [
            units_once(travel, unit_bytes, self.cluster) for travel in self.by_stage(figures.travel)
        ]
        return tuple(
            Once(
                forward=ahead,
                backward=back,
                gather=gather,
                reduce=reduced,
                update=update,
                gathered_in=gathered_in,
                reduced_in=reduced_in,
            )
            for ahead, back, gather, reduced, (gathered_in, reduced_in), update in zip(
                forward, backward, *sums, units, self._updates(), strict=True
            )
        )

    @property
    def seconds(self) -> float:
        """Seconds of the step, where every rank has a core of its own."""
        last = once_seconds(self.once, self.cluster.backend, self.plan.schedule.interleave)
        return self.run.seconds + last + self.figures.call


def played_stages(plan: Plan, analysis: Analysis, cluster: Cluster) -> PlayedStages:
    """Play a step of a plan whose stages have equal meshes."""
    if not has_account(plan):
        raise PlanError("the timeline of stages on different meshes is not drawn")
    schedule = plan.schedule
    chunks = len(plan.stages)
    orders = pipeline_order(
        schedule.pipeline,
        chunks // schedule.interleave,
        schedule.micro_batches,
        schedule.interleave,
        edges=neighbours(chunks),
        train=analysis.train,
    )
    return PlayedStages(
        plan=plan,
        cluster=cluster,
        figures=stages_figures(plan, analysis, cluster),
        starts=_starts(plan, analysis),
        orders=orders,
    )


def stages_seconds(plan: Plan, analysis: Analysis, cluster: Cluster) -> float:
    """Seconds of a step of a plan whose stages have equal meshes."""
    played = played_stages(plan, analysis, cluster)
    busy = [one.busy(plan.schedule.micro_batches) for one in played.once]
    return shared_seconds(cluster, played.seconds, busy)


def stages_figures(
    plan: Plan, analysis: Analysis, cluster: Cluster, schedule: Schedule | None = None
) -> OperatorCosts:
    """The figures of every operator on the mesh of a stage; `schedule`: another than the plan's."""
    inside = schedule or plan.schedule.in_stage
    program = execution(plan.assignment(analysis), analysis, inside).micro.program
    part = split_batch(analysis, inside.micro_batches) if inside.micro_batches > 1 else analysis
    prices = MeshPrices(cluster=cluster, mesh=plan.mesh_, unit_bytes=inside.unit_bytes)
    return operator_costs(
        program,
        part,
        prices,
        optimizer=plan.model.optimizer,
        schedule=inside,
        merges=inside.overlap_experts,
    )


def _starts(plan: Plan, analysis: Analysis) -> list[int]:
    """The numbers of the stages' first operators."""
    places = {op.name: place for place, op in enumerate(analysis.graph.operators)}
    starts = [places.get(stage.first, -1) for stage in plan.stages]
    if starts[0] != 0 or any(before >= after for before, after in itertools.pairwise(starts)):
        raise PlanError(
            f"the plan's stages begin with {', '.join(stage.first for stage in plan.stages)}: not "
            "the model's order"
        )
    return starts
