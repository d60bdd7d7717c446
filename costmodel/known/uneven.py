"""The price of pipelines whose stages differ: in their devices, their meshes, their layers and in what they recompute.

Every stage is priced on its own devices, and the schedule plays these unequal stages. Different replicas of the
pipeline run at the same time, and the reduction of gradients waits for the slowest:

    step = max over pipelines(schedule of their stages) + max over stages(exposed reduction) + max over stages(update)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import UsageError
from autopar.order.schedules import in_flight

from ..cluster.level import ALONE
from ..cluster.model import Cluster, bind_axes
from ..cluster.stage_messages import crossing
from ..memory.occupancy import occupied
from ..step.pipeline import pipeline_seconds
from .configuration import Configuration
from .memory import Members, loads_of, stage_peak
from .parts import Places
from .passes import Passes, Site
from .shape import Shape
from .step import Priced

CLOSE = 1e-6
"""Tolerance of the number of layers, summed over the stages, against those of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage.

    `layers`: groups of layers, each with their number and their configuration. Configurations of a stage differ in
    recomputation; those of different stages also in tensor and data parallelism. `start`: number of its first device.
    """

    layers: tuple[tuple[float, Configuration], ...]
    start: int

    @property
    def own(self) -> Configuration:
        """The configuration that all its layers share."""
        return self.layers[0][1]


def price_stages(shape: Shape, pipelines: Sequence[Sequence[Stage]], cluster: Cluster) -> Priced:
    """Predict a step of pipelines of these stages, replicas of one another, on devices of the cluster.

    `shape`: the model as every stage computes it. The data parallelism of a configuration counts the replicas in all
    pipelines. Raises `UsageError` if the stages have more or fewer layers than the model, differ in their
    micro-batches, or have more devices than the cluster.
    """
    for stages in pipelines:
        _check(shape, stages)
    found = [_Pipeline(shape, stages, _sites(stages, pipelines, cluster)) for stages in pipelines]
    slowest = max(found, key=lambda one: one.seconds)
    reduction, update = (max(getattr(one, name) for one in found) for name in ("reduction", "update"))
    return Priced(
        step=slowest.seconds + reduction + update, pipeline=slowest.seconds, reduction=reduction, update=update,
        forward=tuple(slowest.forward), backward=tuple(slowest.backward), arithmetic=max(one.arithmetic for one in found),
        allocated=tuple(max(values) for values in zip(*(one.allocated for one in found), strict=True)),
        memory=max(memory for one in found for memory in one.memory), fits=all(one.fits for one in found),
    )  # fmt: skip


def _check(shape: Shape, stages: Sequence[Stage]) -> None:
    layers = sum(count for stage in stages for count, _ in stage.layers)
    if abs(layers - len(shape.kinds())) > CLOSE:
        raise UsageError(f"the stages have {layers:g} layers, the model {len(shape.kinds())}")
    if len({stage.own.micro_batches for stage in stages}) > 1:
        raise UsageError("the stages of a pipeline have as many micro-batches each")
    if any(stage.own.pipeline != len(stages) for stage in stages):
        raise UsageError(f"each configuration of a pipeline of {len(stages)} stages says so")


def _devices(stage: Stage, replicas: int) -> int:
    """Devices of a stage of one of as many pipelines."""
    c = stage.own
    if c.data % replicas or (replicas > 1 and (c.expert > 1 or c.data > replicas)):
        raise UsageError(f"{replicas} pipelines that differ have one of {replicas} replicas each, and no experts; not {c.data} replicas")
    return c.devices // c.pipeline // replicas


def _sites(stages: Sequence[Stage], pipelines: Sequence[Sequence[Stage]], cluster: Cluster) -> list[Site]:
    """The sites of the stages of a pipeline."""
    found = []
    for place, stage in enumerate(stages):
        c, count = stage.own, _devices(stage, len(pipelines))
        own = cluster.part(stage.start, count)
        following = stages[min(place + 1, len(stages) - 1)]
        ends = [end for one in (stage, following) for end in (one.start, one.start + _devices(one, len(pipelines)))]
        sends, level = crossing(cluster, min(ends), max(ends)) if following is not stage else (own, ALONE)
        axes = bind_axes(own, (c.data // c.expert_data // len(pipelines), c.expert_data, c.context, c.tensor))
        together = bind_axes(own, (count // c.tensor, c.tensor))
        assert axes is not None and together is not None, "a part has as many devices as it was asked for"
        reduces, replicas = own, together[0]
        if len(pipelines) > 1:
            starts = [chain[place].start for chain in pipelines]
            reduces, replicas = crossing(cluster, min(starts), max(starts) + count)
        places = Places(stages=level, axes=axes, replicas=replicas)
        found.append(Site(cluster=own, places=places, sends=sends, reduces=reduces, senders=2))
    return found


class _Pipeline:
    """One pipeline."""

    def __init__(self, shape: Shape, stages: Sequence[Stage], sites: Sequence[Site]) -> None:
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.allocated: list[float] = []
        self.memory: list[float] = []
        weight, sends, arithmetic, start = [], [], [], 0.0
        self.fits, self.reduction, self.update = True, 0.0, 0.0
        for index, (stage, site) in enumerate(zip(stages, sites, strict=True)):
            groups = [Passes(shape, c, site) for _, c in stage.layers]
            members = _members(shape, stage, start, first=index == 0, last=index == len(stages) - 1)
            start += sum(count for count, _ in stage.layers)
            each = list(zip(groups, members, strict=True))
            ahead, back, weights = map(sum, zip(*(one.seconds(own) for one, own in each), strict=True))
            parameters, experts = map(sum, zip(*(one.stored(own) for one, own in each), strict=True))
            self.forward.append(ahead)
            self.backward.append(back)
            weight.append(weights)
            sends.append(groups[0].send() if index < len(stages) - 1 else 0.0)
            arithmetic.append(sum(one.arithmetic(own) for one, own in each))
            self.reduction = max(self.reduction, groups[0].reduction(parameters, experts, ahead, back))
            self.update = max(self.update, groups[0].update(parameters, experts))
            self._remember(shape, groups, members, index)
        c = stages[0].own
        self.arithmetic = c.micro_batches * max(arithmetic)
        self.seconds = pipeline_seconds(
            c.pipeline_schedule, self.forward, self.backward, weight, sends, c.micro_batches, c.interleave,
            overlap_sends=c.habits.overlap_sends,
        )  # fmt: skip

    def _remember(self, shape: Shape, groups: Sequence[Passes], members: Sequence[Mapping[str, float]], index: int) -> None:
        """Note the memory of a stage's devices."""
        c, cluster = groups[0].c, groups[0].cluster
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


def _members(shape: Shape, stage: Stage, start: float, *, first: bool, last: bool) -> list[dict[str, float]]:
    """The number of each part in every group of a stage; the first group has the embedding, the last the head."""
    found: list[dict[str, float]] = []
    for count, _ in stage.layers:
        layers: dict[str, float] = {}
        for place, kind in enumerate(shape.kinds()):
            share = min(place + 1, start + count) - max(place, start)
            if share > 0:
                layers[kind] = layers.get(kind, 0.0) + share
        start += count
        found.append({"embed": 1.0, **layers} if first and not found else layers)
    if last:
        found[-1] |= {"mtp": 1.0, "head": 1.0} if shape.mtp else {"head": 1.0}
    return found
