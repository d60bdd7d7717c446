"""The price of a known configuration, from a transformer's shape and its parallel degrees.

The scheme pins every operator of the graph of one layer, the embedding and the head
(`part_seconds`); equal layers are priced once. A stage's micro-batch takes the sum of its parts.
Pipeline, reduction of gradients and optimizer make up the step:

    step = pipeline(forward + backward of every stage) + exposed reduction of gradients + update
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.memory.stage_occupancy import occupied
from autopar.order.schedules import in_flight, step_seconds
from autopar.order.times import Times
from benchmarks.validating.known.shape import Shape

from .configuration import Configuration
from .layer_distribution import staged
from .stage_memory import peak_bytes
from .stage_passes import Passes, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Predicted seconds of a step by part, and bytes of the fullest device.

    `forward`, `backward`: seconds of a micro-batch by stage. `allocated`: bytes of tensors at the
    peak, of a device of each stage. `memory`: the same with allocator, context and libraries;
    `reserved`: the context's part of it.
    `arithmetic`: seconds of products and attention on the busiest stage, without recompute and
    bubble.
    """

    step: float
    pipeline: float
    reduction: float
    update: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    arithmetic: float
    allocated: tuple[float, ...]
    memory: float
    reserved: float
    fits: bool


def price(shape: Shape, configuration: Configuration, cluster: Cluster) -> Priced:
    """Predict a step of `configuration` on the cluster, cut or grown to its devices.

    Raises `UsageError` if degrees do not divide the shape (it names the operator), or if there are
    more stages than layers.
    """
    passes = Passes(
        shape, configuration, Site.of(configuration, cluster.sized(configuration.devices))
    )
    parameters = {name: part.parameters for name, part in passes.parts.items()}
    return _priced(passes, staged(shape, configuration, parameters))


def _priced(passes: Passes, stages: Sequence[Mapping[str, float]]) -> Priced:
    """The step of stages that have these parts."""
    c = passes.c
    device = passes.cluster.device
    forward, backward, weight = zip(*map(passes.seconds, stages), strict=True)
    times = Times.of(
        forward, backward, weight, passes.send(), overlap=c.habits.overlaps_sends(c.interleave)
    )
    pipeline = step_seconds(c.pipeline_schedule, times, c.micro_batches, c.interleave)
    pipeline += _uncovered(passes, stages)
    stored = [passes.stored(members) for members in stages]
    fullest = max(range(len(stored)), key=lambda i: stored[i][0])
    reduction = passes.reduction(*stored[fullest], forward[fullest], backward[-1])
    update = passes.update(*stored[fullest])
    allocated = peak_bytes(passes.shape, c, passes.cluster, passes.parts, stages)
    memory = (
        max(occupied(m, device, expandable=c.habits.expandable) for m in allocated)
        + c.habits.workspace
    )
    return Priced(
        step=pipeline + reduction + update,
        pipeline=pipeline,
        reduction=reduction,
        update=update,
        forward=forward,
        backward=backward,
        arithmetic=c.micro_batches * max(map(passes.arithmetic, stages)),
        allocated=tuple(m.total + c.habits.workspace for m in allocated),
        memory=memory,
        reserved=device.reserved,
        fits=bool(memory <= device.memory_capacity),
    )


def _uncovered(passes: Passes, stages: Sequence[Mapping[str, float]]) -> float:
    """Seconds of rows on their way to experts that no pass of another micro-batch covers.

    Passes forward before the first pass backward, and as many backward at the end, run alone.
    """
    c = passes.c
    if not c.overlap_experts:
        return 0.0
    return max(
        passes.uncovered(members)
        * (
            in_flight(c.pipeline_schedule, stage, c.pipeline, c.micro_batches, c.interleave)
            if c.pipeline > 1
            else 1.0
        )
        for stage, members in enumerate(stages)
    )
