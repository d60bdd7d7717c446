"""The price of pipelines whose stages differ in devices, meshes, layers and recompute.

Every stage is priced on its own devices, and the schedule plays these unequal stages. Different
replicas of the pipeline run at the same time, and the reduction of gradients waits for the slowest:

    step = max over pipelines(schedule of their stages) + max over stages(exposed reduction)
           + max over stages(update)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.cluster.level import ALONE
from autopar.costmodel.cluster.stage_messages import crossing
from autopar.costmodel.memory.stage_occupancy import occupied
from autopar.errors import UsageError
from autopar.order.schedules import in_flight, step_seconds
from autopar.order.times import Times
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.summed.configuration import Configuration
from benchmarks.validating.summed.part_figures import places_of
from benchmarks.validating.summed.priced_step import Priced
from benchmarks.validating.summed.stage_memory import Members, loads_of, stage_peak
from benchmarks.validating.summed.stage_passes import Passes, Site

CLOSE = 1e-6
"""Tolerance of the number of layers, summed over the stages, against those of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a pipeline: its layers, and where its devices begin.

    `layers`: groups of layers, each with their number and their configuration. Configurations of a
    stage differ in recomputation; those of different stages also in tensor and data parallelism.
    `start`: number of its first device.
    """

    layers: tuple[tuple[float, Configuration], ...]
    start: int

    @property
    def own(self) -> Configuration:
        """The configuration that all its layers share."""
        return self.layers[0][1]


def price_stages(shape: Shape, pipelines: Sequence[Sequence[Stage]], cluster: Cluster) -> Priced:
    """Predict a step of pipelines of these stages, replicas of one another.

    `shape`: the model as every stage computes it. The data parallelism of a configuration counts
    the replicas in all pipelines. Raises `UsageError` if the stages have more or fewer layers than
    the model, differ in their micro-batches, or have more devices than the cluster.
    """
    for stages in pipelines:
        _check(shape, stages)
    priced = [_Pipeline(shape, stages, _sites(stages, pipelines, cluster)) for stages in pipelines]
    slowest = max(priced, key=lambda one: one.seconds)
    reduction, update = (
        max(getattr(one, name) for one in priced) for name in ("reduction", "update")
    )
    return Priced(
        step=slowest.seconds + reduction + update,
        pipeline=slowest.seconds,
        reduction=reduction,
        update=update,
        forward=tuple(slowest.forward),
        backward=tuple(slowest.backward),
        arithmetic=max(one.arithmetic for one in priced),
        allocated=tuple(
            max(values) for values in zip(*(one.allocated for one in priced), strict=True)
        ),
        memory=max(memory for one in priced for memory in one.memory),
        reserved=cluster.device.reserved,
        fits=all(one.fits for one in priced),
    )


def _check(shape: Shape, stages: Sequence[Stage]) -> None:
    layers = sum(count for stage in stages for count, _ in stage.layers)
    if abs(layers - len(shape.kinds())) > CLOSE:
        raise UsageError(f"the stages have {layers:g} layers, the model {len(shape.kinds())}")
    if len({stage.own.micro_batches for stage in stages}) > 1:
        raise UsageError("the stages of a pipeline have as many micro-batches each")
    if any(stage.own.copies > 1 for stage in stages):
        raise UsageError("hybrid sharding is priced for equal pipelines alone")
    if any(stage.own.pipeline != len(stages) for stage in stages):
        raise UsageError(f"each configuration of a pipeline of {len(stages)} stages says so")


def _devices(stage: Stage, replicas: int) -> int:
    """Devices of a stage of one of as many pipelines."""
    c = stage.own
    if c.data % replicas or (replicas > 1 and (c.expert > 1 or c.data > replicas)):
        raise UsageError(
            f"{replicas} pipelines that differ have one of {replicas} replicas each, and no "
            f"experts; not {c.data} replicas"
        )
    return c.devices // c.pipeline // replicas


def _sites(
    stages: Sequence[Stage], pipelines: Sequence[Sequence[Stage]], cluster: Cluster
) -> list[Site]:
    """The sites of the stages of a pipeline."""
    sites = []
    for place, stage in enumerate(stages):
        c = stage.own
        count = _devices(stage, len(pipelines))
        own = cluster.part(stage.start, count)
        following = stages[min(place + 1, len(stages) - 1)]
        # Some message crosses the level that joins all devices of both stages.
        ends = [
            end
            for one in (stage, following)
            for end in (one.start, one.start + _devices(one, len(pipelines)))
        ]
        sends, level = (
            crossing(cluster, min(ends), max(ends)) if following is not stage else (own, ALONE)
        )
        places = places_of(c, own, stages=1, pipelines=len(pipelines))
        reduces = own
        if len(pipelines) > 1:
            starts = [chain[place].start for chain in pipelines]
            reduces, replicas = crossing(cluster, min(starts), max(starts) + count)
            places = replace(places, replicas=replicas, shards=replicas, copies=replicas)
        places = replace(places, stages=level)
        # A message between two stages has two ends, whatever the number of stages.
        sites.append(Site(cluster=own, places=places, sends=sends, reduces=reduces, senders=2))
    return sites


class _Pipeline:
    """The seconds and the memory of one pipeline, stage by stage."""

    def __init__(self, shape: Shape, stages: Sequence[Stage], sites: Sequence[Site]) -> None:
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.allocated: list[float] = []
        self.memory: list[float] = []
        weight = []
        sends = []
        arithmetic = []
        start = 0.0
        self.fits = True
        self.reduction = 0.0
        self.update = 0.0
        for index, (stage, site) in enumerate(zip(stages, sites, strict=True)):
            groups = [Passes(shape, c, site) for _, c in stage.layers]
            members = _members(shape, stage, start, first=index == 0, last=index == len(stages) - 1)
            start += sum(count for count, _ in stage.layers)
            each = list(zip(groups, members, strict=True))
            ahead, back, weights = map(
                sum, zip(*(one.seconds(own) for one, own in each), strict=True)
            )
            parameters, experts = map(
                sum, zip(*(one.stored(own) for one, own in each), strict=True)
            )
            self.forward.append(ahead)
            self.backward.append(back)
            weight.append(weights)
            sends.append(groups[0].send() if index < len(stages) - 1 else 0.0)
            arithmetic.append(sum(one.arithmetic(own) for one, own in each))
            self.reduction = max(
                self.reduction, groups[0].reduction(parameters, experts, ahead, back)
            )
            self.update = max(self.update, groups[0].update(parameters, experts))
            self._remember(shape, groups, members, index)
        c = stages[0].own
        self.arithmetic = c.micro_batches * max(arithmetic)
        times = Times.of(self.forward, self.backward, weight, sends, overlap=c.habits.overlap_sends)
        self.seconds = step_seconds(c.pipeline_schedule, times, c.micro_batches, c.interleave)

    def _remember(
        self,
        shape: Shape,
        groups: Sequence[Passes],
        members: Sequence[Mapping[str, float]],
        index: int,
    ) -> None:
        """Note the memory of a stage's devices."""
        c = groups[0].c
        cluster = groups[0].cluster
        own = [
            Members(load=loads_of(shape, one.c, one.cluster), parts=one.parts, c=one.c, count=count)
            for one, count in zip(groups, members, strict=True)
        ]
        flying = in_flight(c.pipeline_schedule, index, c.pipeline, c.micro_batches, c.interleave)
        peak = stage_peak(own, flying=flying, tied=shape.tied)
        memory = occupied(peak, cluster.device, expandable=c.habits.expandable) + c.habits.workspace
        self.allocated.append(peak.total + c.habits.workspace)
        self.memory.append(memory)
        self.fits &= memory <= cluster.device.memory_capacity


def _members(
    shape: Shape, stage: Stage, start: float, *, first: bool, last: bool
) -> list[dict[str, float]]:
    """Return the number of each part in every group of a stage.

    The first group has the embedding, the last the head.
    """
    members: list[dict[str, float]] = []
    for count, _ in stage.layers:
        layers: dict[str, float] = {}
        for place, kind in enumerate(shape.kinds()):
            # A stage may have fractions of layers, so its range may overlap a layer in part.
            share = min(place + 1, start + count) - max(place, start)
            if share > 0:
                layers[kind] = layers.get(kind, 0.0) + share
        start += count
        members.append({"embed": 1.0, **layers} if first and not members else layers)
    if last:
        members[-1] |= {"mtp": 1.0, "head": 1.0} if shape.mtp else {"head": 1.0}
    return members
