"""Bytes of a device in a known configuration, at the peak of its fullest stage.

A stage holds its parameters with gradients and optimizer state, and for every micro-batch in flight what its layers keep (`occupancy`, from
one walk of the program of two layers with embedding and head). `occupied` adds what the allocator and the libraries take.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir import DTYPE_BYTES
from autopar.order.schedules import in_flight
from autopar.sharding.program import Compute, Program
from autopar.sharding.redistribution import local_bytes

from ..cluster import Cluster
from ..liveness import Recompute
from ..memory import precision_named
from ..occupancy import Load, loads, occupied, stage_memory
from .configuration import Configuration, Habits
from .parts import PARTS, Parts, PartSeconds, part_of, places_of
from .shape import Shape


def working(shape: Shape, c: Configuration, cluster: Cluster) -> Mapping[str, Load]:
    """What a micro-batch puts on a device, part by part, whatever the pipeline and the number of micro-batches."""
    batch = c.micro_batch * c.expert
    one = replace(c, pipeline=1, interleave=1, schedule="1f1b", data=c.expert, zero=0, global_batch=batch)
    kept = Habits(selective=c.habits.selective, kept=c.habits.kept, regather=c.habits.regather)
    return _working(replace(shape, layers=1), replace(one, habits=kept), cluster)


@functools.lru_cache(maxsize=1024)
def _working(shape: Shape, c: Configuration, cluster: Cluster) -> Mapping[str, Load]:
    """From the program of two layers: the second stands for all, since its input is a layer's output too."""
    parts = Parts(shape, c, cluster, places_of(c, cluster.sized(c.devices)), layers=2)
    program = parts.program()
    second = tuple(f"layers.{index}." for index in range(parts.period, 2 * parts.period))

    def place(name: str) -> str:
        part = part_of(name)
        return "before" if part == "embed" or (part == "layer" and not name.startswith(second)) else part

    again = [op.name for op in parts.analysis.warm if part_of(op.name) == "layer" and (c.habits.kept or c.repeats(op.name))]
    segments = tuple(tuple(name for name in again if name.startswith(second) is late) for late in (False, True))
    found = loads(
        program, parts.analysis, place, optimizer="none", precision=precision_named("same"),  # what is stored is counted apart
        recompute=Recompute(segments=segments if c.recompute != "none" else ()), regather=c.habits.regather,
    )  # fmt: skip
    layer, before = found["layer"], found["before"]
    embed = replace(before, saved=max(before.saved - layer.saved, 0.0))
    if c.recompute == "selective" and c.habits.kept:
        layer = replace(layer, saved=layer.saved + _kept_outputs(program, c) / 2)
    return {"embed": embed, "layer": replace(layer, saved=layer.saved / parts.period), "head": found["head"]}


def _kept_outputs(program: Program, c: Configuration) -> float:
    """Outputs that layers keep although they are recomputed."""
    return sum(
        local_bytes(layout, program.graph.tensors[name].bytes, program.assignment.mesh.shape)
        for step in program.steps
        if isinstance(step, Compute) and part_of(step.operator.name) == "layer" and not c.repeats(step.operator.name)
        for name, layout in zip(step.operator.outputs, step.decision.outputs, strict=True)
    )


def stored_bytes(part: PartSeconds, c: Configuration) -> float:
    """Parameters of a part with their gradients and optimizer state."""
    shards = c.replicas
    weights = DTYPE_BYTES[c.dtype] / (shards if c.zero == 3 else 1)
    gradients = c.habits.gradient_bytes / (shards if c.zero >= 2 else 1)
    states = c.habits.state_bytes / (shards if c.zero >= 1 else 1)
    return part.parameters * (weights + gradients + states)


def peak_bytes(shape: Shape, c: Configuration, cluster: Cluster, parts: Mapping[str, PartSeconds], layers: Sequence[int]) -> float:
    """Bytes at the peak of the fullest stage, with what the allocator and the framework take."""
    found = working(shape, c, cluster)
    layer = found["layer"]
    if c.recompute == "full" and c.habits.recomputed < 1:
        whole = working(shape, replace(c, recompute="none"), cluster)["layer"]
        layer = replace(layer, saved=c.habits.recomputed * layer.saved + (1 - c.habits.recomputed) * whole.saved)
    gathered = 2 * parts["layer"].gathered if c.zero == 3 else 0.0
    peaks = []
    for stage, count in enumerate(layers):
        counts = dict(zip(PARTS, (float(stage == 0), float(count), float(stage == len(layers) - 1)), strict=True))
        flying = in_flight(c.pipeline_schedule, stage, len(layers), c.micro_batches, c.interleave)
        memory = stage_memory([(layer if part == "layer" else found[part], counts[part]) for part in PARTS], in_flight=flying)
        stored = sum(counts[part] * stored_bytes(parts[part], c) for part in PARTS)
        if counts["head"] and not counts["embed"] and shape.tied:
            stored += stored_bytes(parts["embed"], c)  # the head's copy of the tied table
        moving = replace(memory, parameters=stored + gathered, gradients=0.0, master=0.0, optimizer=0.0)
        peaks.append(occupied(moving, cluster.device))
    return max(peaks)
