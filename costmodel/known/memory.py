"""Bytes of a device in a known configuration, at the peak of each of its stages.

A stage holds its parameters with gradients and optimizer state, and for every micro-batch in flight what its layers keep (`occupancy`, from
one walk of the program of two layers of each kind with embedding and head).
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
from ..memory import Memory, precision_named
from ..occupancy import Load, loads, stage_memory
from .configuration import Configuration, Habits
from .parts import Parts, PartSeconds, alone, of_kinds, places_of
from .shape import Shape


def working(shape: Shape, c: Configuration, cluster: Cluster) -> Mapping[str, Load]:
    """What a micro-batch puts on a device, part by part, whatever the pipeline and the number of micro-batches."""
    kept = Habits(selective=c.habits.selective, kept=c.habits.kept, regather=c.habits.regather, loss=c.habits.loss)
    return _working(of_kinds(shape), tuple(shape.of_each_kind()), replace(alone(c), zero=0, habits=kept), cluster)


@functools.lru_cache(maxsize=1024)
def _working(shape: Shape, kinds: tuple[str, ...], c: Configuration, cluster: Cluster) -> Mapping[str, Load]:
    """From the program of two layers of each kind: the second stands for all, since its input is a layer's output too."""
    parts = Parts(shape, c, cluster, places_of(c, cluster.sized(c.devices)), kinds=(*kinds, *kinds))
    program, part_of = parts.program(), parts.model.part
    second = tuple(f"layers.{index}." for index in range(len(kinds), 2 * len(kinds)))

    def place(name: str) -> str:
        part = part_of(name)
        return "before" if part == "embed" or (part in kinds and not name.startswith(second)) else part

    again = [op.name for op in parts.analysis.warm if part_of(op.name) in (*kinds, "mtp") and (c.habits.kept or c.repeats(op.name))]
    segments = tuple(tuple(name for name in again if name.startswith(f"layers.{index}.")) for index in range(2 * len(kinds)))
    found = loads(
        program, parts.analysis, place, optimizer="none", precision=precision_named("same"),  # what is stored is counted apart
        recompute=Recompute(segments=segments if c.recompute != "none" else ()), regather=c.habits.regather,
    )  # fmt: skip
    layers = {kind: found[kind] for kind in kinds}
    before = found["before"]
    embed = replace(before, saved=max(before.saved - sum(layer.saved for layer in layers.values()), 0.0))
    if c.recompute == "selective" and c.habits.kept:
        kept = _kept_outputs(program, c, parts)
        layers = {kind: replace(layer, saved=layer.saved + kept.get(kind, 0.0) / 2) for kind, layer in layers.items()}
    ends = {name: found[name] for name in ("mtp", "head") if name in found}
    return {"embed": embed, **layers, **ends}


def _kept_outputs(program: Program, c: Configuration, parts: Parts) -> dict[str, float]:
    """Outputs that layers keep although they are recomputed, by kind."""
    found: dict[str, float] = {}
    for step in program.steps:
        if isinstance(step, Compute) and step.operator.name.startswith("layers.") and not c.repeats(step.operator.name):
            for name, layout in zip(step.operator.outputs, step.decision.outputs, strict=True):
                size = local_bytes(layout, program.graph.tensors[name].bytes, program.assignment.mesh.shape)
                part = parts.model.part(name)
                found[part] = found.get(part, 0.0) + size
    return found


def stored_bytes(part: PartSeconds, c: Configuration) -> float:
    """Parameters of a part with their gradients and optimizer state; experts are sharded over the ranks that have the same ones."""
    gradients, states = c.habits.gradient_bytes, c.habits.state_bytes
    weights = DTYPE_BYTES[c.dtype] if c.habits.weight_bytes is None else c.habits.weight_bytes
    total = 0.0
    for elements, shards in ((part.parameters - part.experts, c.replicas), (part.experts, max(c.replicas // c.expert_data, 1))):
        each = weights / (shards if c.zero == 3 else 1) + gradients / (shards if c.zero >= 2 else 1)
        total += elements * (each + states / (shards if c.zero >= 1 else 1))
    return total


def peak_bytes(
    shape: Shape, c: Configuration, cluster: Cluster, parts: Mapping[str, PartSeconds], stages: Sequence[Mapping[str, float]]
) -> list[Memory]:
    """By stage, the memory of a device at its peak; `stages`: how often each has every part."""
    found = dict(working(shape, c, cluster))
    if c.recompute == "full" and c.habits.recomputed < 1:
        whole = working(shape, replace(c, recompute="none"), cluster)
        for kind in shape.of_each_kind():
            saved = c.habits.recomputed * found[kind].saved + (1 - c.habits.recomputed) * whole[kind].saved
            found[kind] = replace(found[kind], saved=saved)
    gathered = 2 * max(part.gathered for name, part in parts.items() if name not in ("embed", "head")) if c.zero == 3 else 0.0
    peaks = []
    for stage, members in enumerate(stages):
        flying = in_flight(c.pipeline_schedule, stage, len(stages), c.micro_batches, c.interleave)
        memory = stage_memory([(found[part], count) for part, count in members.items()], in_flight=flying)
        stored = sum(count * stored_bytes(parts[part], c) for part, count in members.items())
        if members.get("head") and not members.get("embed") and shape.tied:
            stored += stored_bytes(parts["embed"], c)  # the head's copy of the tied table
        peaks.append(replace(memory, parameters=stored + gathered, gradients=0.0, master=0.0, optimizer=0.0))
    return peaks
