"""Seconds and stored elements of the parts of a known transformer (embedding, layer, head), from the program that its pins make.

The program of one layer with embedding and head is the ordinary one (`pinned_assignment`, `build_program`); each step is priced for the
part that its name begins with, once for all configurations in which its local sizes are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from autopar.ir import DTYPE_BYTES, Role
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.direct_assignment import pinned_assignment
from autopar.sharding.layout import Kind, Layout
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.program import Compute, Program, Redistribute, build_program, chain_collectives, operator_collectives
from autopar.sharding.redistribution import local_bytes

from ..cluster import Cluster, bind_axes
from ..estimate import step_seconds
from ..fusion import inside_chains
from ..pass_player import Seconds
from ..pricing import MeshPrices
from ..timeline import SLOWDOWN
from .configuration import Configuration
from .shape import Shape
from .transformer import Transformer, transformer

PARTS = ("embed", "layer", "head")


def exposed(communication: float, cover: float) -> float:
    """Seconds that a collective adds to the compute that covers it: what is longer than the cover, and the slowdown of the rest."""
    return max(0.0, communication - cover) + (SLOWDOWN["nccl"] - 1) * min(communication, cover)


@dataclass(slots=True, kw_only=True)
class PartSeconds:
    """Seconds of one micro-batch through a part of the model, and the bytes that it stores on a device.

    `forward`, `backward`: compute. `again`: forward compute and communication of what selective recompute repeats.
    `moved`: exposed collectives forward and backward. `parameters`: elements that a device uses, of which
    `experts` differ between expert-parallel ranks. `gathered`: bytes of parameters gathered (ZeRO-3). `issued`: kernels and
    collectives that the host issues, which is what bounds a part whose kernels are short.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    again: float = 0.0
    moved_forward: float = 0.0
    moved_backward: float = 0.0
    parameters: float = 0.0
    experts: float = 0.0
    gathered: float = 0.0
    issued_forward: float = 0.0
    issued_backward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysed:
    """The graph of a transformer, what it offers, the values `inside` fused chains, and the seconds of operators priced so far."""

    model: Transformer
    analysis: Analysis
    inside: frozenset[str]
    seconds: dict[object, Seconds]


@functools.lru_cache(maxsize=256)
def analysed(shape: Shape, batch: int, dtype: str, attention: str, norm: str, products: str, layers: int) -> Analysed:
    """Build and analyse a transformer once."""
    model = transformer(shape, batch=batch, dtype=dtype, attention=attention, norm=norm, products=products, layers=layers)
    analysis = analyse(model.graph, train=True)
    return Analysed(model=model, analysis=analysis, inside=inside_chains(analysis), seconds={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Levels that the axes of a configuration span: `axes` are data, expert, context and tensor; `replicas`: the first three together."""

    stages: str
    axes: tuple[str, ...]
    replicas: str


def places_of(c: Configuration, cluster: Cluster) -> Places:
    """Pipeline stages outermost, then data, expert and context parallelism, tensor parallelism over neighbouring devices."""
    levels = bind_axes(cluster, (c.pipeline, c.data // c.expert, c.expert, c.context, c.tensor))
    together = bind_axes(cluster, (c.pipeline, c.replicas, c.tensor))
    assert levels is not None and together is not None
    return Places(stages=levels[0], axes=levels[1:], replicas=together[1])


def parts_of(shape: Shape, c: Configuration, cluster: Cluster) -> Mapping[str, PartSeconds]:
    """The parts of a configuration on a cluster of as many devices; data-parallel ranks run the program of one."""
    alone = replace(c, pipeline=1, interleave=1, schedule="1f1b", data=c.expert, global_batch=c.micro_batch * c.expert)
    one = replace(shape, layers=1)
    return _parts_of(one, alone, cluster, places_of(c, cluster))


@functools.lru_cache(maxsize=4096)
def _parts_of(shape: Shape, c: Configuration, cluster: Cluster, places: Places) -> Mapping[str, PartSeconds]:
    return Parts(shape, c, cluster, places).parts()


class Parts:
    """The parts of one configuration."""

    def __init__(self, shape: Shape, c: Configuration, cluster: Cluster, places: Places, *, layers: int = 1) -> None:
        self.shape, self.c, self.cluster = shape, c, cluster
        self.period = shape.expert_every if shape.experts else 1
        sizes = (c.data // c.expert, c.expert, c.context, c.tensor)
        named = zip(("data", "expert", "context", "tensor"), sizes, places.axes, strict=True)
        self.mesh = Mesh(axes=tuple(Axis(name=n, size=s, level=level) for n, s, level in named if s > 1))
        self.prices = MeshPrices(cluster=cluster, mesh=self.mesh)
        found = analysed(shape, c.micro_batch * c.data, c.dtype, c.attention, c.norm, c.products, layers * self.period)
        self.model, self.analysis, self.seconds = found.model, found.analysis, found.seconds
        self.inside = found.inside if c.habits.fused else frozenset()
        self.axis = {axis.name: index for index, axis in enumerate(self.mesh.axes)}

    def program(self) -> Program:
        """The program of one micro-batch through one layer, with embedding and head."""
        c = self.c
        kinds = {"data": "data", "expert": "expert", "context": "context", "tensor": "sequence" if c.sequence_parallel else "tensor"}
        names = [kinds[axis.name] for axis in self.mesh.axes]
        wanted = {name: [getattr(w, kind) or w.data for kind in names] for name, w in self.model.wanted.items()}
        split = [self.axis[name] for name in ("data", "expert") if name in self.axis] if c.zero == 3 else []
        return build_program(self.model.graph, pinned_assignment(self.analysis, self.mesh, wanted, split_storage=split))

    def parts(self) -> dict[str, PartSeconds]:
        """Price the program step by step, each step for the part that its name begins with."""
        program = self.program()
        found = {part: PartSeconds() for part in PARTS}
        weights: dict[tuple[str, Layout], float] = {}
        moves: list[Redistribute] = []
        for step in program.steps:
            if isinstance(step, Redistribute):
                moves.append(step)
                continue
            name = step.operator.name
            part = found[part_of(name)]
            forward, backward, weight = self.operator(step)
            part.forward += forward
            part.backward += backward
            part.weight += weight
            again = self.c.repeats(name)
            part.again += forward if again else 0.0
            part.issued_forward += 1
            part.issued_backward += (backward > 0) + (weight > 0)
            if weight:
                place = (step.operator.inputs[0], step.decision.inputs[0])
                weights[place] = weights.get(place, 0.0) + weight
            if any(option.communication for option in step.decision.options):
                for collective in operator_collectives(self.model.graph, step, self.mesh.shape, self.analysis.gradients):
                    seconds = self.prices.seconds(collective.kind, collective.axis, collective.nbytes)
                    if collective.phase == "forward":
                        part.moved_forward += seconds
                        part.again += seconds if again else 0.0
                    else:
                        part.moved_backward += seconds
        for step in moves:
            if self.model.graph.tensors[step.tensor].is_float:
                self.move(step, found[part_of(step.tensor)], weights)
        self.stored(program, found)
        if self.period > 1:
            found["layer"] = PartSeconds(**{name: value / self.period for name, value in asdict(found["layer"]).items()})
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
        part.issued_forward += len(forward)
        part.issued_backward += len(backward)
        part.moved_forward += ahead
        part.moved_backward += exposed(back, cover)
        if self.c.habits.regather and back and ahead:
            part.moved_backward += exposed(ahead, cover)

    def operator(self, step: Compute) -> Seconds:
        """Seconds forward, backward, and of the part of backward that makes gradients of parameters."""
        sizes = [1.0] * (len(step.decision.rule.factors) if step.decision.rule else 0)
        for option, axis in zip(step.decision.options, self.mesh.axes, strict=True):
            for factor in (option.factor, *option.partners):
                if factor >= 0:
                    sizes[factor] *= axis.size
        key = (step.operator.name, tuple(sizes), self.cluster.device, self.c.habits.fused)
        if key not in self.seconds:
            self.seconds[key] = step_seconds(step, self.analysis, self.prices, self.inside)
        return self.seconds[key]

    def stored(self, program: Program, found: dict[str, PartSeconds]) -> None:
        """Elements of parameters that a device uses in each part (ZeRO-3 stores a share of them)."""
        expert = self.axis.get("expert", -1)
        for tensor in program.graph.parameters:
            layout = program.assignment.storage[tensor.name]
            own = ".experts." in tensor.name and not tensor.name.endswith("router.weight")
            apart = [a for name, a in self.axis.items() if name == "data" or (name == "expert" and not own)]
            used = tuple(p for a, p in enumerate(layout) if a not in apart)
            sizes = [s for a, s in enumerate(self.mesh.shape) if a not in apart]
            elements = local_bytes(used, tensor.bytes, sizes) / DTYPE_BYTES[tensor.dtype]
            part = found[part_of(tensor.name)]
            part.parameters += elements
            part.experts += elements if own and expert >= 0 else 0.0
            if self.c.zero == 3 and not any(layout[a].kind is Kind.SPLIT for a in apart):
                part.gathered += elements * DTYPE_BYTES[tensor.dtype]  # no dim divides: its shards are cut from the flat parameter


def part_of(name: str) -> str:
    """The part, of `PARTS`, of an operator or a tensor by its name."""
    head = name.partition(".")[0]
    return "layer" if head == "layers" else head
