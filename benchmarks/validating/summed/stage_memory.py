"""Bytes of a device in a known configuration, at the peak of each of its stages.

A stage holds its parameters with gradients and optimizer state, and the saved values of its layers
for every micro-batch in flight. These come from one walk of the program of two layers of each kind
with embedding and head (`memory.stage_occupancy`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.device.device import ITEMSIZE, TF32
from autopar.costmodel.frameworks import LOSSES, Habits
from autopar.costmodel.memory.autograd_liveness import Autograd, Recompute
from autopar.costmodel.memory.peak import Memory
from autopar.costmodel.memory.stage_occupancy import Load, loads, stage_memory
from autopar.costmodel.memory.states import Training
from autopar.ir import DTYPE_BYTES
from autopar.order.schedules import in_flight
from autopar.sharding.program import Compute, Program
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.rules.experts import EXPERTS
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.state_part import SCAN
from benchmarks.validating.summed.recompute_modules import LAYER

from .configuration import Configuration
from .part_figures import PartSeconds, alone, of_kinds, places_of
from .part_seconds import Parts
from .stage_passes import ENDS


def working(shape: Shape, c: Configuration, cluster: Cluster) -> Mapping[str, Load]:
    """Return the load of a micro-batch on a device, by part.

    It is the same whatever the pipeline and the number of micro-batches.
    """
    # Only these habits change what a part saves; without the others more calls meet in the cache.
    h = c.habits
    habits = Habits(
        selective=h.selective,
        saved_outputs=h.saved_outputs,
        regather=h.regather,
        loss=h.loss,
        fused=h.fused,
    )
    return _working(
        of_kinds(shape),
        tuple(shape.of_each_kind()),
        replace(alone(c), zero=0, habits=habits),
        cluster,
    )


@functools.lru_cache(maxsize=1024)
def _working(
    shape: Shape, kinds: tuple[str, ...], c: Configuration, cluster: Cluster
) -> Mapping[str, Load]:
    """Return loads from the program of two layers of each kind.

    The second layer stands for all: its input is a layer's output.
    """
    parts = Parts(shape, c, cluster, places_of(c, cluster.sized(c.devices)), kinds=(*kinds, *kinds))
    program = parts.program()
    part_of = parts.model.part
    second = tuple(f"layers.{index}." for index in range(len(kinds), 2 * len(kinds)))

    def place(name: str) -> str:
        if name.startswith(LOSS):
            return "loss"
        part = part_of(name)
        return (
            "before" if part == "embed" or (part in kinds and not name.startswith(second)) else part
        )

    by_part = loads(
        program,
        parts.analysis,
        place,
        Training(optimizer="none"),  # stored bytes are counted apart
        Autograd(
            recompute=Recompute(
                segments=_repeated(parts, c),
                discarded=frozenset(filter(c.discards, (op.name for op in parts.analysis.warm))),
            ),
            regather=c.habits.regather,
        ),
    )
    layers = {kind: by_part[kind] for kind in kinds}
    before = by_part["before"]
    # `before` holds the embedding and the first layer of each kind.
    embed = replace(
        before, saved=max(before.saved - sum(layer.saved for layer in layers.values()), 0.0)
    )
    if c.recompute == "selective" and c.habits.saved_outputs:
        outputs = _saved_outputs(program, c, parts)
        # The program has two layers of each kind, and both were counted.
        layers = {
            kind: replace(layer, saved=layer.saved + outputs.get(kind, 0.0) / 2)
            for kind, layer in layers.items()
        }
    # With saved outputs nothing else is there: inputs of products are made again.
    elif c.recompute != "full":
        spared = _spared(parts, program)
        layers = {
            kind: replace(layer, saved=layer.saved - spared.get(kind, 0.0) / 2)
            for kind, layer in layers.items()
        }
    head = replace(by_part["head"], excess=LOSSES[c.habits.loss].at_most * _logits(program))
    return {
        "embed": embed,
        **layers,
        **({"mtp": by_part["mtp"]} if "mtp" in by_part else {}),
        "head": head,
    }


def _spared(parts: Parts, program: Program) -> dict[str, float]:
    """Bytes by kind of layer that its kernels keep less than autograd would.

    Operands of narrow products are kept in their cast type (in addition to attention's results);
    values inside the fused activation of experts are not kept.
    """
    c = parts.c
    tensors = program.graph.tensors
    mesh = program.assignment.mesh.shape
    size = (
        ITEMSIZE[c.kernels.products] / DTYPE_BYTES[c.dtype]
        if c.kernels.products not in ("", TF32)
        else 1.0
    )
    spared: dict[str, float] = {}
    seen: set[str] = set()
    discarded: set[str] = set()
    for step in program.steps:
        if not isinstance(step, Compute) or not step.operator.name.startswith("layers."):
            continue
        name = step.operator.inputs[0]
        operator = step.operator
        less = 0.0
        if c.discards(operator.name):
            discarded.update(operator.outputs)
        if c.repeats(operator.name) or name in discarded:
            continue  # nothing of it is kept
        if operator.kind == EXPERTS:
            inner = (parts.shape.expert_ffn or parts.shape.ffn) / c.inner
            rows = local_bytes(step.decision.outputs[0], tensors[operator.outputs[0]].bytes, mesh)
            activation = rows * inner / (parts.shape.expert_hidden or parts.shape.hidden)
            recomputed = c.recompute == "selective" and "moe_act" in c.recompute_modules
            less = (1 - size) * rows + (activation if recomputed else (1 - size) * activation)
            less += activation if c.habits.fused and parts.shape.gated else 0.0
        elif "compute" in operator.attributes and c.kernels.products != TF32 and name not in seen:
            seen.add(name)
            whole = local_bytes(step.decision.inputs[0], tensors[name].bytes, mesh)
            less = -size * whole if operator.name.endswith(".attention.out") else (1 - size) * whole
        part = parts.model.part(operator.name)
        spared[part] = spared.get(part, 0.0) + less
    return spared


LOSS = ("head.float", "head.view", "head.loss")
"""Operators of the loss; their memory follows its kernels (`LOSSES`), not autograd."""


def _logits(program: Program) -> float:
    """Logits of a rank as its loss reads them."""
    step = next(
        step
        for step in program.steps
        if isinstance(step, Compute) and step.operator.name == "head.loss"
    )
    size = program.graph.tensors[step.operator.inputs[0]].size
    return local_bytes(step.decision.inputs[0], size, program.assignment.mesh.shape)


def _repeated(parts: Parts, c: Configuration) -> tuple[tuple[str, ...], ...]:
    """Return the recomputed segments, layer by layer.

    They are operators of the recompute, and those that fused backward kernels repeat.
    """
    layers: dict[str, list[str]] = {}
    for op in parts.analysis.warm:
        if own := LAYER.match(op.name):
            layers.setdefault(own.group(), []).append(op.name)
    segments = [
        tuple(
            name
            for name in names
            if (c.habits.saved_outputs or c.repeats(name)) and not c.discards(name)
        )
        for names in layers.values()
        if c.recompute != "none"
    ]
    named = {name for segment in segments for name in segment}
    scans = [tuple(name for name in names if SCAN in name) for names in layers.values()]
    segments += [scan for scan in scans if scan and named.isdisjoint(scan)]
    named |= {name for scan in scans for name in scan}
    return (*segments, *(chain for chain in _chains(parts) if named.isdisjoint(chain)))


def _chains(parts: Parts) -> Iterator[tuple[str, ...]]:
    """The operators of each fused kernel."""
    operators = parts.analysis.graph.operators
    chain_of = dict[str, list[str]]()
    for op in parts.analysis.warm:
        if op.outputs[0] in parts.inside:
            chain = chain_of.setdefault(op.name, [op.name])
            reader = operators[parts.analysis.readers[op.outputs[0]][0][0]].name
            if reader in chain_of:
                chain_of[reader].extend(name for name in chain if name not in chain_of[reader])
                chain_of.update(dict.fromkeys(chain, chain_of[reader]))
            else:
                chain.append(reader)
                chain_of[reader] = chain
    yield from dict.fromkeys(tuple(chain) for chain in chain_of.values())


def _saved_outputs(program: Program, c: Configuration, parts: Parts) -> dict[str, float]:
    """Bytes of the outputs that recomputed layers save, by kind."""
    nbytes: dict[str, float] = {}
    for step in program.steps:
        if (
            isinstance(step, Compute)
            and step.operator.name.startswith("layers.")
            and not c.repeats(step.operator.name)
        ):
            for name, layout in zip(step.operator.outputs, step.decision.outputs, strict=True):
                size = local_bytes(
                    layout, program.graph.tensors[name].bytes, program.assignment.mesh.shape
                )
                part = parts.model.part(name)
                nbytes[part] = nbytes.get(part, 0.0) + size
    return nbytes


def stored_bytes(part: PartSeconds, c: Configuration) -> float:
    """Return the bytes of a part's parameters, gradients and optimizer state.

    They are sharded over replicas, those of experts over the replicas of their own. Stages that are
    whole hold what is gathered beside the shards, and what is to be reduced.
    """
    gradients = c.habits.gradient_bytes
    states = c.habits.state_bytes
    used = DTYPE_BYTES[c.dtype]
    weights = used if c.habits.weight_bytes is None else c.habits.weight_bytes
    total = 0.0
    for elements, shards in (
        (part.parameters - part.experts, c.sharing),
        (part.experts, c.expert_sharing),
    ):
        each = weights / (shards if c.zero == 3 else 1) + gradients / (shards if c.zero >= 2 else 1)
        total += elements * (each + states / (shards if c.zero >= 1 else 1))
        total += elements * used if c.whole_stages else 0.0
        total += elements * gradients if c.whole_gradients else 0.0
    return total


def peak_bytes(
    shape: Shape,
    c: Configuration,
    cluster: Cluster,
    parts: Mapping[str, PartSeconds],
    stages: Sequence[Mapping[str, float]],
) -> list[Memory]:
    """The memory of a device at its peak, by stage; `stages`: the count of every part on each."""
    by_part = loads_of(shape, c, cluster)
    flying = [
        in_flight(c.pipeline_schedule, stage, len(stages), c.micro_batches, c.interleave)
        for stage in range(len(stages))
    ]
    return [
        stage_peak(
            [Members(load=by_part, parts=parts, c=c, count=count)],
            flying=flying[stage],
            tied=shape.tied,
        )
        for stage, count in enumerate(stages)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The number of each part on a stage, with the parts' loads under one configuration."""

    load: Mapping[str, Load]
    parts: Mapping[str, PartSeconds]
    c: Configuration
    count: Mapping[str, float]


def stage_peak(members: Sequence[Members], *, flying: float, tied: bool) -> Memory:
    """Return the memory of a device of one stage at its peak.

    `flying`: micro-batches between forward and backward.
    """
    memory = stage_memory(
        [(one.load[part], count) for one in members for part, count in one.count.items()],
        in_flight=flying,
    )
    stored = sum(
        count * stored_bytes(one.parts[part], one.c)
        for one in members
        for part, count in one.count.items()
    )
    has = {part for one in members for part, count in one.count.items() if count}
    parts = members[0].parts
    c = members[0].c
    if "head" in has and "embed" not in has and tied:
        stored += stored_bytes(parts["embed"], c)  # the head's copy of the tied table
    # `stored` has gradients and optimizer states in it.
    stored += _gathered(parts, c, has) if c.gathers else 0.0
    return replace(memory, parameters=stored, gradients=0.0, master=0.0, optimizer=0.0)


def _gathered(parts: Mapping[str, PartSeconds], c: Configuration, has: set[str]) -> float:
    """Bytes of the parameters that are gathered at once."""
    # Two layers are there at once: one in use, and the next one, which is prefetched.
    layers = 2 * max(part.gathered for name, part in parts.items() if name not in ENDS)
    ends = sum(parts[name].gathered for name in ENDS if name in has)
    return layers + (ends if c.habits.whole_ends else 0.0)


def loads_of(shape: Shape, c: Configuration, cluster: Cluster) -> Mapping[str, Load]:
    """Return the loads of the parts.

    Only a share of the layers may be recomputed, or wait in host memory.
    """
    by_part = dict(working(shape, c, cluster))
    whole = (
        working(shape, replace(c, recompute="none"), cluster)
        if c.recompute == "full" and c.habits.recomputed < 1
        else by_part
    )
    for kind in shape.of_each_kind():
        saved = (
            c.habits.recomputed * by_part[kind].saved
            + (1 - c.habits.recomputed) * whole[kind].saved
        )
        by_part[kind] = replace(by_part[kind], saved=(1 - c.habits.offloaded) * saved)
    return by_part
