"""The predicted timeline of a plan's step: the events of a rank, or of every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.costmodel import Cluster
from autopar.costmodel.step.estimate import timeline
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.costmodel.step.streams import COMPUTE, Event
from autopar.costmodel.step.timeline import Timeline
from autopar.costmodel.step.trace import pipeline_events
from autopar.plan import Plan
from autopar.planning.tables.parameters.traffic import once_seconds
from autopar.sharding.analysis import Analysis
from autopar.sharding.micro_batches import split_batch

from .played_stages import played_stages

ROUNDING = 1e-9
"""The share of a step below which a span is no event."""


def timelines(plan: Plan, analysis: Analysis, cluster: Cluster) -> Mapping[str, Sequence[Event]]:
    """The events of a step by rank or stage."""
    if plan.stages:
        return _of_stages(plan, analysis, cluster)
    role = f"each of {plan.devices} ranks" if plan.devices > 1 else "the only rank"
    return {role: timeline_of_rank(plan, analysis, cluster).events}


def timeline_of_rank(plan: Plan, analysis: Analysis, cluster: Cluster) -> Timeline:
    """The timeline of a rank in a step of a plan without stages."""
    prices = MeshPrices(cluster=cluster, mesh=plan.mesh_, unit_bytes=plan.schedule.unit_bytes)
    micro = plan.execution(analysis).micro
    count = plan.schedule.micro_batches
    part = split_batch(analysis, count) if count > 1 else analysis
    return timeline(micro, part, prices, optimizer=plan.model.optimizer)


def _of_stages(plan: Plan, analysis: Analysis, cluster: Cluster) -> Mapping[str, Sequence[Event]]:
    """The events of each stage in a step of a pipeline, with simulated times.

    Work once a step follows the passes of all stages.
    """
    played = played_stages(plan, analysis, cluster)
    run = played.run
    # What one stage does alone at the end others may cover: none ends after the step.
    ends = [
        min(run.seconds + once_seconds([one], cluster.backend), played.seconds)
        for one in played.once
    ]
    return {
        name: [*events, *_ending(run.seconds, end, own.update)]
        for (name, events), end, own in zip(
            pipeline_events(run).items(), ends, played.once, strict=True
        )
    }


def _ending(start: float, end: float, update: float) -> list[Event]:
    """The events once a step: the exposed collectives of parameters, then the update."""
    updated = end - update if end - update - start > ROUNDING * end else start
    gathered = (
        [Event("parameters' collectives", "collective", COMPUTE, "collective", start, updated)]
        if updated > start
        else []
    )
    return [*gathered, Event("update", "update", COMPUTE, "update", updated, end)]
