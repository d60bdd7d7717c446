"""The predicted timeline of a plan's step: the events of a rank, or of every stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.costmodel import Cluster
from autopar.costmodel.step.estimate import timeline
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.costmodel.step.pipeline_simulation import PipelineRun, simulate
from autopar.costmodel.step.shared_cores import shared_seconds
from autopar.costmodel.step.streams import COMPUTE, Event
from autopar.costmodel.step.trace import pipeline_events
from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.order.execution import execution
from autopar.order.pipeline import neighbours, pipeline_order
from autopar.order.times import Floats, Times
from autopar.plan import Plan
from autopar.planning.stages.operator_costs import OperatorCosts, operator_costs
from autopar.planning.stages.stage import Place, message_seconds
from autopar.planning.tables.parameters.traffic import Once, once_seconds, units_of
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.micro_batches import split_batch

from .account import has_account

ROUNDING = 1e-9
"""The share of a step below which a span is no event."""


def timelines(plan: Plan, graph: Graph, cluster: Cluster) -> Mapping[str, Sequence[Event]]:
    """The events of a step by rank or stage."""
    analysis = analyse(graph, train=plan.model.mode == "train")
    if plan.stages:
        return _of_stages(plan, analysis, cluster)
    role = f"each of {plan.devices} ranks" if plan.devices > 1 else "the only rank"
    return {role: timeline_of_rank(plan, analysis, cluster)}


def timeline_of_rank(plan: Plan, analysis: Analysis, cluster: Cluster) -> Sequence[Event]:
    """The events of a rank in a step of a plan without stages."""
    prices = MeshPrices(cluster=cluster, mesh=plan.mesh_, unit_bytes=plan.schedule.unit_bytes)
    micro = plan.execution(analysis).micro
    count = plan.schedule.micro_batches
    part = split_batch(analysis, count) if count > 1 else analysis
    return timeline(micro, part, prices, optimizer=plan.model.optimizer).events


def _of_stages(plan: Plan, analysis: Analysis, cluster: Cluster) -> Mapping[str, Sequence[Event]]:
    """The events of each stage in a step of a pipeline, with simulated times.

    Work once a step follows the passes of all stages.
    """
    if not has_account(plan):
        raise PlanError("the timeline of stages on different meshes is not drawn")
    run, last = _played(plan, analysis, cluster)
    ends = [run.seconds + once_seconds([one], cluster.backend) for one in last]
    return {
        name: [*events, *_ending(run.seconds, end, own.update)]
        for (name, events), end, own in zip(pipeline_events(run).items(), ends, last, strict=True)
    }


def stages_seconds(plan: Plan, analysis: Analysis, cluster: Cluster) -> float:
    """Seconds of a step of a plan whose stages have equal meshes."""
    run, last = _played(plan, analysis, cluster)
    seconds = run.seconds + once_seconds(last, cluster.backend, plan.schedule.interleave)
    return shared_seconds(cluster, seconds, [one.busy(plan.schedule.micro_batches) for one in last])


def _played(plan: Plan, analysis: Analysis, cluster: Cluster) -> tuple[PipelineRun, list[Once]]:
    """The passes of all stages, and their work once a step."""
    schedule = plan.schedule
    chunks = len(plan.stages)
    stages = chunks // schedule.interleave
    figures = stages_figures(plan, analysis, cluster)
    starts = _starts(plan, analysis)

    def by_stage(values: Floats) -> list[float]:
        sums = np.add.reduceat(values, starts)
        return [math.fsum(sums[stage::stages]) for stage in range(stages)]

    devices = [
        Place(cluster=cluster, start=stage * plan.mesh_.devices, count=plan.mesh_.devices)
        for stage in range(stages)
    ]
    handed = [
        float(figures.handed[starts[number + 1]]) if number + 1 < chunks else 0.0
        for number in range(stages)
    ]
    forward = by_stage(figures.forward)
    backward = by_stage(figures.backward)
    once = by_stage(figures.once)
    gather = by_stage(figures.gather)
    update = by_stage(figures.update)
    travel = by_stage(figures.travel)
    times = Times.of(forward, backward, by_stage(figures.weight), message_seconds(devices, handed))
    orders = pipeline_order(
        schedule.pipeline,
        stages,
        schedule.micro_batches,
        schedule.interleave,
        edges=neighbours(chunks),
        train=analysis.train,
    )
    last = [
        Once(
            forward=forward[stage],
            backward=backward[stage],
            gather=gather[stage],
            reduce=once[stage] - gather[stage],
            update=update[stage],
            units=units_of(travel[stage], schedule.unit_bytes, cluster),
        )
        for stage in range(stages)
    ]
    return simulate(orders, times, schedule.interleave), last


def _ending(start: float, end: float, update: float) -> list[Event]:
    """The events once a step: the exposed collectives of parameters, then the update."""
    updated = end - update if end - update - start > ROUNDING * end else start
    gathered = (
        [Event("parameters' collectives", "collective", COMPUTE, "collective", start, updated)]
        if updated > start
        else []
    )
    return [*gathered, Event("update", "update", COMPUTE, "update", updated, end)]


def stages_figures(plan: Plan, analysis: Analysis, cluster: Cluster) -> OperatorCosts:
    """The figures of every operator on the mesh of a stage."""
    schedule = plan.schedule.in_stage
    program = execution(plan.assignment(analysis), analysis, schedule).micro.program
    part = split_batch(analysis, schedule.micro_batches) if schedule.micro_batches > 1 else analysis
    prices = MeshPrices(cluster=cluster, mesh=plan.mesh_, unit_bytes=plan.schedule.unit_bytes)
    return operator_costs(program, part, prices, optimizer=plan.model.optimizer, schedule=schedule)


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
