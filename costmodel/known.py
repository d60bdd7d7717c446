"""The price of a known configuration: a transformer's shape with its parallel degrees, through the ordinary graph and program.

The scheme pins every operator of the graph of one layer, the embedding and the head (`transformer`, `pinned_assignment`); the program that
follows is priced part by part, a layer once for all that are equal. A stage's micro-batch takes what its parts take; the pipeline, the
reduction of gradients and the optimizer make the step of it:

    step = pipeline(forward + backward of every stage) + exposed reduction of gradients + update
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.errors import UsageError, unknown
from autopar.ir import DTYPE_BYTES, Role
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.candidates import Strategies
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.pinned import pinned_assignment
from autopar.sharding.program import Compute, Program, Redistribute, build_program, chain_collectives, operator_collectives
from autopar.sharding.redistribution import local_bytes

from .cluster import Cluster, bind_axes
from .collectives import collective_time
from .compute import memory_seconds
from .operators import operator_parts
from .pipeline import in_flight, pipeline_seconds
from .pricing import MeshPrices
from .transformer import Shape, Transformer, transformer

RECOMPUTE = ("none", "selective", "full")
PARTS = ("embed", "layer", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a training framework overlaps and how it stores: facts about a program, not figures of the hardware.

    `overlap_tensor`: tensor-parallel collectives of the backward pass run under the products of weight gradients. `regather`: what sequence
    parallelism gathers is not kept, but gathered again under the product of the input's gradient. `overlap_gradients`: the
    reduction of gradients runs under the last backward pass. `overlap_sends`: pipeline messages. `prefetch`: the next layer's parameters
    are gathered under the present layer. `scatter_sends`: tensor-parallel ranks send a share each and gather it on arrival.
    `fused_accumulation`: the products of weight gradients add to those of earlier micro-batches, with no pass of their own.
    `fused`: chains of elementwise operators are one kernel. `gradient_bytes`: of an element in the reduction.
    `state_bytes`: of the optimizer for each parameter (master weight and moments); `update_traffic`: bytes moved for each in an update.
    """

    overlap_tensor: bool = False
    regather: bool = False
    overlap_gradients: bool = False
    overlap_sends: bool = False
    prefetch: bool = True
    scatter_sends: bool = True
    fused_accumulation: bool = False
    fused: bool = True
    gradient_bytes: int = 4
    state_bytes: int = 12
    update_traffic: int = 34


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Parallel degrees and schedule of a training run; `global_batch` sequences a step, `micro_batch` of them at once on a device."""

    global_batch: int
    micro_batch: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    schedule: str = "1f1b"
    interleave: int = 1
    attention: str = "flash2"
    norm: str = "fused"
    dtype: str = "bfloat16"
    habits: Habits = field(default_factory=Habits)

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise UsageError(unknown("recompute", self.recompute, RECOMPUTE))
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"ZeRO stages are 0 to 3, not {self.zero}")
        if self.global_batch % (self.micro_batch * self.data):
            raise UsageError(f"a global batch of {self.global_batch} is no multiple of {self.data} x {self.micro_batch} sequences")

    @property
    def devices(self) -> int:
        """Devices that it runs on."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, each through every stage."""
        return self.global_batch // (self.micro_batch * self.data)


@dataclass(slots=True, kw_only=True)
class PartSeconds:
    """Seconds of one micro-batch through a part of the model, and the bytes that it stores on a device.

    `forward`, `backward`: compute. `again`: forward compute and communication of what selective recompute repeats.
    `moved`: exposed collectives forward and backward. `gathered`: bytes of parameters gathered (ZeRO-3).
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    again: float = 0.0
    moved_forward: float = 0.0
    moved_backward: float = 0.0
    parameters: float = 0.0
    gathered: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Predicted seconds of a step, by part, and what the stages take for a micro-batch."""

    step: float
    pipeline: float
    reduction: float
    update: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    parameters: float


@functools.lru_cache(maxsize=256)
def _analysed(shape: Shape, batch: int, dtype: str, attention: str, norm: str) -> tuple[Transformer, Analysis]:
    model = transformer(shape, batch=batch, dtype=dtype, attention=attention, norm=norm, layers=1)
    return model, analyse(model.graph, train=True)


def price(shape: Shape, configuration: Configuration, cluster: Cluster) -> Priced:
    """Predict a step of `configuration` on the cluster, cut or grown to its devices."""
    return _Pricing(shape, configuration, cluster.sized(configuration.devices)).priced()


class _Pricing:
    def __init__(self, shape: Shape, c: Configuration, cluster: Cluster) -> None:
        self.shape, self.c, self.cluster = shape, c, cluster
        sizes = (c.pipeline, c.data, c.context, c.tensor)
        levels = bind_axes(cluster, sizes)
        assert levels is not None
        named = zip(("data", "context", "tensor"), sizes[1:], levels[1:], strict=True)
        self.stage_level, self.data_level = levels[0], levels[1]
        self.mesh = Mesh(axes=tuple(Axis(name=n, size=s, level=level) for n, s, level in named if s > 1))
        self.prices = MeshPrices(cluster=cluster, mesh=self.mesh)
        self.model, self.analysis = _analysed(shape, c.micro_batch * c.data, c.dtype, c.attention, c.norm)
        self.axis = {axis.name: index for index, axis in enumerate(self.mesh.axes)}

    def program(self) -> Program:
        """The program of one micro-batch through one layer, with embedding and head."""
        c = self.c
        kinds = {"data": "data", "context": "context", "tensor": "sequence" if c.sequence_parallel else "tensor"}
        names = [kinds[axis.name] for axis in self.mesh.axes]
        wanted = {name: [getattr(w, kind) for kind in names] for name, w in self.model.wanted.items()}
        split = [self.axis["data"]] if c.zero == 3 and c.data > 1 else []
        return build_program(self.model.graph, pinned_assignment(self.analysis, self.mesh, wanted, split_storage=split))

    def parts(self) -> dict[str, PartSeconds]:
        """Price the program step by step, each step for the part that its name begins with."""
        program = self.program()
        found = {part: PartSeconds() for part in PARTS}
        weights: dict[tuple[str, Layout], float] = {}
        moves: list[Redistribute] = []
        core = ".core"
        for step in program.steps:
            if isinstance(step, Redistribute):
                moves.append(step)
                continue
            name = step.operator.name
            part = found[_part(name)]
            forward, backward, weight = self.operator(step)
            part.forward += forward
            part.backward += backward
            part.weight += weight
            part.again += forward if core in name else 0.0
            if weight:
                place = (step.operator.inputs[0], step.decision.inputs[0])
                weights[place] = weights.get(place, 0.0) + weight
            if any(option.communication for option in step.decision.options):
                for collective in operator_collectives(self.model.graph, step, self.mesh.shape, self.analysis.gradients):
                    seconds = self.prices.seconds(collective.kind, collective.axis, collective.nbytes)
                    if collective.phase == "forward":
                        part.moved_forward += seconds
                        part.again += seconds if core in name else 0.0
                    else:
                        part.moved_backward += seconds
        for step in moves:
            if self.model.graph.tensors[step.tensor].is_float:
                self.move(step, found[_part(step.tensor)], weights)
        self.stored(program, found)
        return found

    def move(self, step: Redistribute, part: PartSeconds, weights: dict[tuple[str, Layout], float]) -> None:
        """A redistribution: gathers of parameters are counted in bytes, others in the seconds that nothing hides."""
        graph = self.model.graph
        forward, backward = chain_collectives(graph, step, self.mesh.shape)
        if graph.tensors[step.tensor].role is Role.PARAMETER:
            part.gathered += sum(c.nbytes for c in forward)
            return
        ahead = sum(self.prices.seconds(c.kind, c.axis, c.nbytes) for c in forward)
        back = sum(self.prices.seconds(c.kind, c.axis, c.nbytes) for c in backward)
        cover = weights.get((step.tensor, step.chain[-1]), 0.0) if self.c.habits.overlap_tensor else 0.0
        part.moved_forward += ahead
        part.moved_backward += exposed(back, cover)
        if self.c.habits.regather and back and ahead:
            part.moved_backward += exposed(ahead, cover)

    def operator(self, step: Compute) -> tuple[float, float, float]:
        sizes = [1.0] * (len(step.decision.rule.factors) if step.decision.rule else 0)
        for option, axis in zip(step.decision.options, self.mesh.axes, strict=True):
            for factor in (option.factor, *option.partners):
                if factor >= 0:
                    sizes[factor] *= axis.size
        c = self.c
        key = (self.shape, c.dtype, c.attention, c.norm, c.habits.fused, c.micro_batch * c.data, step.operator.name, tuple(sizes))
        if key not in _SECONDS.setdefault(self.cluster.device, {}):
            _SECONDS[self.cluster.device][key] = self._operator(step)
        return _SECONDS[self.cluster.device][key]

    def _operator(self, step: Compute) -> tuple[float, float, float]:
        offer = self.analysis.offers[step.operator.name]
        row = np.arange(len(step.decision.options))[None, :]
        strategies = Strategies(rule=offer.rule, options=step.decision.options, choices=row)
        names = (*step.operator.inputs, *step.operator.outputs)
        theirs = (*offer.call.operator.inputs, *offer.call.operator.outputs)
        gradients = frozenset(other for name, other in zip(names, theirs, strict=True) if name in self.analysis.gradients)
        inside = frozenset(other for name, other in zip(names, theirs, strict=True) if self.c.habits.fused and name in _inside(self.analysis))
        parts = operator_parts(offer.call, strategies, self.mesh.shape, self.cluster, gradients, inside)
        return float(parts.forward[0]), float(parts.backward[0]), float(parts.weight[0])

    def stored(self, program: Program, found: dict[str, PartSeconds]) -> None:
        """Elements of parameters that a device uses in each part (ZeRO-3 stores a share of them)."""
        data = self.axis.get("data", -1)
        for tensor in program.graph.parameters:
            layout = program.assignment.storage[tensor.name]
            used = tuple(p for a, p in enumerate(layout) if a != data)
            sizes = [s for a, s in enumerate(self.mesh.shape) if a != data]
            found[_part(tensor.name)].parameters += local_bytes(used, tensor.bytes, sizes) / DTYPE_BYTES[tensor.dtype]

    # --- the step ---

    def layers(self) -> list[int]:
        """Layers of each stage: as many on each, what is left over in the middle."""
        p = self.c.pipeline
        each, over = divmod(self.shape.layers, p)
        start = (p - over) // 2
        return [each + (start <= stage < start + over) for stage in range(p)]

    def priced(self) -> Priced:
        c, parts = self.c, self.parts()
        layer = parts["layer"]
        forward, backward, weight, stored = [], [], [], []
        for stage, count in enumerate(self.layers()):
            ends = [(parts["embed"], stage == 0), (parts["head"], stage == c.pipeline - 1)]
            members = [(layer, count), *((part, 1) for part, here in ends if here)]
            forward.append(sum(n * self.ahead(part) for part, n in members))
            backward.append(sum(n * (self.back(part) + (self.again(part) if part is layer else 0.0)) for part, n in members))
            weight.append(sum(n * part.weight for part, n in members))
            stored.append(sum(n * part.parameters for part, n in members))
        pipeline = pipeline_seconds(
            c.schedule if c.interleave == 1 else "interleaved", forward, backward, weight, self.send(), c.micro_batches, c.interleave,
            overlap_sends=c.habits.overlap_sends,
        )  # fmt: skip
        largest = max(stored)
        reduction = self.reduction(largest, backward[-1])
        update = self.update(largest)
        return Priced(
            step=pipeline + reduction + update, pipeline=pipeline, reduction=reduction, update=update, forward=tuple(forward),
            backward=tuple(backward), parameters=largest,
        )  # fmt: skip

    def gather(self, part: PartSeconds) -> float:
        """Seconds of gathering a part's parameters at once (ZeRO-3)."""
        if not part.gathered:
            return 0.0
        return self.collective("all_gather", part.gathered, self.c.data, self.data_level)

    def collective(self, kind: str, nbytes: float, group: int, level: str) -> float:
        return float(collective_time(kind, nbytes, group, level=level, cluster=self.cluster))

    def ahead(self, part: PartSeconds) -> float:
        busy = part.forward + part.moved_forward
        return max(busy, self.gather(part)) if self.c.habits.prefetch else busy + self.gather(part)

    def back(self, part: PartSeconds) -> float:
        """Backward; under ZeRO-3 the parameters are gathered again and their gradients scattered, under the compute."""
        busy = part.backward + part.moved_backward + self.accumulate(part)
        if not part.gathered:
            return busy
        size = part.gathered * self.c.habits.gradient_bytes / DTYPE_BYTES[self.c.dtype]
        moved = self.gather(part) + self.collective("reduce_scatter", size, self.c.data, self.data_level)
        return max(busy, moved) if self.c.habits.prefetch else busy + moved

    def accumulate(self, part: PartSeconds) -> float:
        """Seconds of adding the gradients of a micro-batch to those of the ones before it, in the precision of the reduction."""
        if self.c.zero == 3 or self.c.habits.fused_accumulation:
            return 0.0
        traffic = DTYPE_BYTES[self.c.dtype] + 2 * self.c.habits.gradient_bytes
        return float(memory_seconds(part.parameters * traffic, self.cluster.device))

    def again(self, part: PartSeconds) -> float:
        if self.c.recompute == "none":
            return 0.0
        return part.again if self.c.recompute == "selective" else part.forward + part.moved_forward

    def send(self) -> float:
        """Seconds of one message between stages, and the gather on arrival where the ranks send shares."""
        c = self.c
        if c.pipeline == 1:
            return 0.0
        nbytes = c.micro_batch * self.shape.sequence // c.context * self.shape.hidden * DTYPE_BYTES[c.dtype]
        share = c.tensor if c.habits.scatter_sends or c.sequence_parallel else 1
        seconds = self.collective("send", nbytes / share, c.pipeline, self.stage_level)
        if share > 1 and not c.sequence_parallel:
            seconds += self.prices.seconds("all_gather", self.axis["tensor"], nbytes)
        return seconds

    def reduction(self, parameters: float, last_backward: float) -> float:
        """Exposed seconds of reducing the gradients of a device once a step (and of gathering the updated shards)."""
        c = self.c
        group = c.data * c.context
        if group == 1 or c.zero == 3:
            return 0.0
        nbytes = parameters * c.habits.gradient_bytes
        if c.zero == 0:
            seconds = self.collective("all_reduce", nbytes, c.data, self.data_level)
        else:
            seconds = self.collective("reduce_scatter", nbytes, c.data, self.data_level)
            seconds += self.collective("all_gather", parameters * DTYPE_BYTES[c.dtype], c.data, self.data_level)
        return max(0.0, seconds - last_backward) if c.habits.overlap_gradients else seconds

    def update(self, parameters: float) -> float:
        shards = self.c.data if self.c.zero else 1
        return float(memory_seconds(parameters * self.c.habits.update_traffic / shards, self.cluster.device))


OVERLAP_SLOWDOWN = 0.1256
"""Share by which products slow down while a collective runs beside them (Galvatron's profile of 8 x A100; Hetu-Galvatron)."""


def exposed(communication: float, cover: float) -> float:
    """Seconds that a collective adds to the compute that covers it: what is longer than the cover, and the slowdown of the rest."""
    return max(0.0, communication - cover) + OVERLAP_SLOWDOWN * min(communication, cover)


_SECONDS: dict[object, dict[object, tuple[float, float, float]]] = {}


def _part(name: str) -> str:
    head = name.partition(".")[0]
    return "layer" if head == "layers" else head


def _inside(analysis: Analysis) -> frozenset[str]:
    """Values that stay inside a chain of elementwise kernels: made by one, read by just one other."""
    return frozenset()
