"""Bytes of a device in a known configuration, at the peak of its fullest stage.

A stage holds its parameters with gradients and optimizer state, for every micro-batch in flight what its layers keep, and what passes at
the peak. What a layer keeps is the difference between the programs of two layers and of one (`liveness`), without a head to speak of; what
the head adds is the difference to the program with its real vocabulary.

    stage = states + (in_flight(stage) * layers * kept + kept by embedding or head) * (1 + slack) + passing * (1 + slack')
    device = max over stages of the above + reserved
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir import DTYPE_BYTES
from autopar.sharding.layout import Kind
from autopar.sharding.program import Compute, Redistribute
from autopar.sharding.redistribution import local_bytes

from .cluster import Cluster
from .configuration import Configuration, Habits
from .kept import facts_of
from .liveness import Recompute, live_bytes
from .parts import Parts, PartSeconds, places_of
from .pipeline import in_flight
from .transformer import Shape

KEPT_SLACK = 0.2
PASSING_SLACK = 0.9
"""What the caching allocator holds besides what is kept for the backward pass, and besides what comes and goes (blocks of other sizes,
fragments), as shares of those; fitted to which of 422 published runs ran out of memory (2311.05610)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """Bytes of one micro-batch on one device: `layer`: kept by a layer; `ends`: kept by embedding and head; `passing`: besides, at the peak
    of a stage without a head, and with one."""

    layer: float
    ends: float
    passing: float
    passing_head: float


def working(shape: Shape, c: Configuration, cluster: Cluster) -> Working:
    """What a micro-batch needs on a device, whatever the pipeline and the number of micro-batches."""
    batch = c.micro_batch * c.expert
    one = replace(c, pipeline=1, interleave=1, schedule="1f1b", data=c.expert, zero=0, global_batch=batch)
    alone = replace(one, habits=_kept_habits(c.habits))
    return _working(replace(shape, layers=1), alone, cluster)


def _kept_habits(habits: Habits) -> Habits:
    """Those habits that memory depends on."""
    return Habits(selective=habits.selective, kept=habits.kept, regather=habits.regather)


@functools.lru_cache(maxsize=1024)
def _working(shape: Shape, c: Configuration, cluster: Cluster) -> Working:
    small = replace(shape, vocab=8 * c.tensor)
    one, two, whole = (_walked(s, c, cluster, layers) for s, layers in ((small, 1), (small, 2), (shape, 1)))
    layer = (two[0] - one[0]) / (shape.expert_every if shape.experts else 1)
    return Working(layer=layer, ends=max(whole[0] - layer, 0.0), passing=one[1] - one[0], passing_head=whole[1] - whole[0])


def _walked(shape: Shape, c: Configuration, cluster: Cluster, layers: int) -> tuple[float, float]:
    """Bytes that a program keeps from forward to backward, and its peak, without what is stored."""
    parts = Parts(shape, c, cluster, places_of(c, cluster.sized(c.devices)), layers=layers)
    program = parts.program()
    names = [op.name for op in parts.analysis.warm]
    segments = tuple(
        tuple(name for name in names if name.startswith(f"layers.{index}.") and (c.habits.kept or c.repeats(name)))
        for index in range(layers * parts.period)
    )
    recompute = Recompute(segments=segments if c.recompute != "none" else ())
    live = live_bytes(program, facts_of(parts.analysis), train=True, recompute=recompute, accumulating=True)
    saved, peak = live.saved, max(sum(x) for x in zip(live.kept, live.buffers, live.passing, strict=True))
    if c.recompute == "selective" and c.habits.kept:
        extra = sum(
            local_bytes(layout, program.graph.tensors[name].bytes, parts.mesh.shape)
            for step in program.steps
            if isinstance(step, Compute) and step.operator.name.startswith("layers.") and not c.repeats(step.operator.name)
            for name, layout in zip(step.operator.outputs, step.decision.outputs, strict=True)
        )
        saved, peak = saved + extra, peak + extra
    if c.habits.regather and c.recompute != "full":
        again = sum(
            tensor.bytes * (1 - 1 / c.tensor) / (c.data * c.context)
            for step in program.steps
            if isinstance(step, Redistribute)
            and (tensor := program.graph.tensors[step.tensor]).is_float
            and [p.kind for p in step.chain[0]].count(Kind.SPLIT) > [p.kind for p in step.chain[-1]].count(Kind.SPLIT)
            and step.tensor.startswith("layers")
        )
        saved, peak = saved - again, peak - again
    return saved, peak


def stored_bytes(part: PartSeconds, c: Configuration) -> float:
    """Parameters of a part with their gradients and optimizer state."""
    shards = c.data * c.context
    weights = DTYPE_BYTES[c.dtype] / (shards if c.zero == 3 else 1)
    gradients = c.habits.gradient_bytes / (shards if c.zero >= 2 else 1)
    states = c.habits.state_bytes / (shards if c.zero >= 1 else 1)
    return part.parameters * (weights + gradients + states)


def peak_bytes(shape: Shape, c: Configuration, cluster: Cluster, parts: Mapping[str, PartSeconds], layers: list[int]) -> float:
    """Bytes at the peak of the fullest stage, with the allocator's slack and what the framework reserves."""
    needs = working(shape, c, cluster)
    schedule = c.schedule if c.interleave == 1 else "interleaved"
    gathered = c.habits.buffer_bytes + (2 * parts["layer"].gathered if c.zero == 3 else 0.0)
    layer = needs.layer
    if c.recompute == "full" and c.habits.recomputed < 1:
        whole = working(shape, replace(c, recompute="none"), cluster).layer
        layer = c.habits.recomputed * layer + (1 - c.habits.recomputed) * whole
    peaks = []
    for stage, count in enumerate(layers):
        first, last = stage == 0, stage == len(layers) - 1
        stored = stored_bytes(parts["layer"], c) * count
        stored += stored_bytes(parts["embed"], c) * (first or last) + stored_bytes(parts["head"], c) * last
        flying = in_flight(schedule, stage, len(layers), c.micro_batches, c.interleave)
        kept = flying * layer * count + (needs.ends if last else 0.0)
        passing = max(needs.passing, needs.passing_head) if last else needs.passing
        peaks.append(stored + kept * (1 + KEPT_SLACK) + passing * (1 + PASSING_SLACK) + gathered)
    return max(peaks) + cluster.device.reserved
