"""Seconds and stored elements of the parts of a known transformer, from its pins.

The parts are the embedding, each kind of layer, and the head. The program of one layer of each kind
with embedding and head is the ordinary one (`pinned_assignment`, `build_program`). Each step is
priced for the part in its name, once for all configurations with equal local sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.device import scan_kernels
from autopar.costmodel.device.elementwise import memory_seconds, with_launch
from autopar.costmodel.frameworks import LOSSES, Framework
from autopar.costmodel.step.covered import SLOWDOWN, Covers, Seconds
from autopar.costmodel.step.estimate import step_seconds
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.ir import DTYPE_BYTES, Role
from autopar.sharding.direct_assignment import pinned_assignment
from autopar.sharding.layout import Kind, S
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.program import (
    Compute,
    Program,
    Redistribute,
    chain_collectives,
    operator_collectives,
)
from autopar.sharding.program_builder import build_program
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.rules import RULES
from autopar.sharding.rules.experts import EXPERTS
from autopar.sharding.rules.recurrent import STATE_SPACE
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.state_part import SCAN
from benchmarks.validating.summed.dispatch import Group

from .analysed_graphs import analysed, own_kernels, routed
from .configuration import Configuration
from .exposed_messages import exposed
from .issued_calls import calls_of_experts, in_a_graph
from .part_figures import PartSeconds, Places, alone, of_kinds, places_of
from .travel import Rows, ways_of_rows

EXPERT_WEIGHTS = (".experts.up.weight", ".experts.down.weight")
"""Endings of the names of weights of experts."""


def parts_of(
    shape: Shape, c: Configuration, cluster: Cluster, places: Places | None = None
) -> Mapping[str, PartSeconds]:
    """Return the parts of a configuration on a cluster of as many devices.

    `places`: the levels of its axes, if unusual.
    """
    return _parts_of(
        of_kinds(shape),
        tuple(shape.of_each_kind()),
        alone(c),
        cluster,
        places or places_of(c, cluster),
    )


@functools.lru_cache(maxsize=4096)
def _parts_of(
    shape: Shape, kinds: tuple[str, ...], c: Configuration, cluster: Cluster, places: Places
) -> Mapping[str, PartSeconds]:
    return Parts(shape, c, cluster, places, kinds=kinds).parts()


class Parts:
    """The parts of one configuration: of a model with one layer of each of the `kinds`."""

    def __init__(
        self,
        shape: Shape,
        c: Configuration,
        cluster: Cluster,
        places: Places,
        *,
        kinds: Sequence[str] = ("dense",),
    ) -> None:
        self.shape = shape
        self.c = c
        # What ZeRO-3 shares out is summed apart from products.
        adds = c.habits.fused_accumulation and c.zero < 3
        habits = replace(c.habits, fused_accumulation=adds)
        self.cluster = cluster = cluster.run_by(Framework(habits=habits, kernels=c.kernels))
        self.group = Group(size=c.expert, level=places.experts, cluster=cluster)
        levels = dict(places.axes)
        self.axes = c.axes
        self.mesh = Mesh(
            axes=tuple(Axis(name=a.name, size=a.size, level=levels[a.name]) for a in c.axes)
        )
        self.prices = MeshPrices(cluster=cluster, mesh=self.mesh)
        self.loss = LOSSES[c.habits.loss]
        kernels = replace(own_kernels(shape, c), wide_loss=self.loss.wide)
        analysed_model = analysed(
            shape, c.micro_batch * c.data, c.dtype, kernels, tuple(kinds), routed(shape, c)
        )
        self.model = analysed_model.model
        self.analysis = analysed_model.analysis
        self.seconds = analysed_model.seconds
        self.inside = analysed_model.inside if c.habits.fused else frozenset()

    def program(self) -> Program:
        """The program of one micro-batch through the layers, with embedding and head."""
        c = self.c
        tensor = "sequence" if c.sequence_parallel else "tensor"
        kinds = [tensor if a.outside == "tensor" else a.outside for a in self.axes]
        uses = [(kind, a.inside) for kind, a in zip(kinds, self.axes, strict=True)]
        wanted = {
            name: [w.on(kind, inside) for kind, inside in uses]
            for name, w in self.model.wanted.items()
        }
        if c.context_by == "heads" and c.context > 1:
            cores = (name for name in wanted if name.endswith(".core") and "layers." in name)
            wanted.update(
                (
                    name,
                    [
                        S(1) if kind == "context" else pin
                        for kind, pin in zip(kinds, wanted[name], strict=True)
                    ],
                )
                for name in cores
            )
        split = [i for i, a in enumerate(self.axes) if a.outside == "data"] if c.zero == 3 else []
        return build_program(
            self.model.graph,
            pinned_assignment(self.analysis, self.mesh, wanted, split_storage=split),
        )

    def parts(self) -> dict[str, PartSeconds]:
        """Price the program step by step, each step for the part that its name begins with."""
        program = self.program()
        parts: dict[str, PartSeconds] = {
            self.model.part(op.name): PartSeconds() for op in program.graph.operators
        }
        covers = Covers(self.c.habits)
        moves: list[Redistribute] = []
        for step in program.steps:
            if isinstance(step, Redistribute):
                moves.append(step)
            else:
                self.count(step, parts[self.model.part(step.operator.name)], covers)
        # Behind all operators, since a redistribution may hide under the products of its readers.
        for step in moves:
            # Integers are inputs, which arrive in the layout in which they are read.
            if self.model.graph.tensors[step.tensor].is_float:
                self.move(step, parts[self.model.part(step.tensor)], covers)
        self.summed(program, parts)
        self.stored(program, parts)
        return parts

    def summed(self, program: Program, parts: dict[str, PartSeconds]) -> None:
        """Add autograd's work between operators.

        Gradients of several readers are summed, those of several views are joined.
        """
        graph = program.graph
        mesh = program.assignment.mesh.shape

        def add(name: str, nbytes: float) -> None:
            seconds = with_launch(
                0.0, memory_seconds(nbytes, self.cluster.device), self.cluster.device
            )
            parts[self.model.part(name)].backward += float(seconds)

        for step in program.steps:
            if not isinstance(step, Compute):
                continue
            for name, layout in zip(step.operator.outputs, step.decision.outputs, strict=True):
                readers = [index for index, _ in self.analysis.readers.get(name, ()) if index >= 0]
                if len(readers) > 1 and name in self.analysis.gradients and name not in self.inside:
                    size = local_bytes(layout, graph.tensors[name].bytes, mesh)
                    # Each addition reads two gradients and writes one.
                    add(graph.operators[readers[0]].name, 3 * (len(readers) - 1) * size)
            # The kernel of a gate writes both halves of its gradient itself.
            if len(step.operator.outputs) > 1 and not step.operator.name.endswith(".half"):
                add(
                    step.operator.name,
                    2
                    * local_bytes(
                        step.decision.inputs[0], graph.tensors[step.operator.inputs[0]].bytes, mesh
                    ),
                )

    def count(self, step: Compute, part: PartSeconds, covers: Covers) -> None:
        """Add the seconds of an operator and of the collectives inside it."""
        name = step.operator.name
        seconds = self.operator(step)
        if self.c.habits.filled:
            seconds = self._filled(step, seconds)
        part.forward += seconds.forward
        # The backward pass of a scan has its own kernels for what it computes again.
        repeats = SCAN in name and step.operator.kind != STATE_SPACE
        part.backward += seconds.backward + (seconds.forward if repeats else 0.0)
        part.weight += seconds.weight
        if RULES[step.operator.kind].products:
            part.arithmetic += seconds.forward + seconds.backward
        recomputed = self.c.repeats(name)
        part.recomputed += seconds.forward if recomputed else 0.0
        calls_ahead, calls_back = self._calls(step, seconds)
        part.issued_forward += calls_ahead
        part.issued_backward += calls_back
        covers.add(step, seconds)
        if ".experts.shared." in name:
            part.shared_forward += seconds.forward
            part.shared_backward += seconds.backward
        if step.operator.kind == EXPERTS:
            tokens, width = self.model.graph.tensors[step.operator.inputs[0]].shape
            rows = local_bytes(step.decision.inputs[0], tokens, self.mesh.shape)
            ahead, back = ways_of_rows(
                self.shape, self.c, Rows(tokens=rows, width=width), self.group
            )
            part.travel_forward += ahead
            part.travel_backward += back
            part.recomputed += ahead if recomputed else 0.0
            return
        moved = {"forward": 0.0, "backward": 0.0}
        for collective in operator_collectives(
            self.model.graph, step, self.mesh.shape, self.analysis.gradients
        ):
            moved[collective.phase] += self.prices.seconds(
                collective.kind, collective.axes, collective.nbytes
            )
        if self.c.habits.overlap_context and name.endswith(".core"):
            moved = {
                "forward": exposed(moved["forward"], seconds.forward),
                "backward": exposed(moved["backward"], seconds.backward),
            }
        part.moved_forward += moved["forward"]
        part.moved_backward += moved["backward"]
        part.recomputed += moved["forward"] if recomputed else 0.0

    def _calls(self, step: Compute, seconds: Seconds) -> tuple[int, int]:
        """Return the calls that the host issues for an operator forward and backward.

        The graph has one operator for a layer of experts and for a scan; frameworks run many.
        """
        operator = step.operator
        if self.c.habits.graphed and in_a_graph(operator.name):
            return 0, 0
        if operator.kind == STATE_SPACE:
            return scan_kernels.FORWARD, scan_kernels.BACKWARD
        calls = calls_of_experts(self.shape, self.c) if operator.kind == EXPERTS else 1
        return calls, calls * ((seconds.backward > 0) + (seconds.weight > 0))

    def move(self, step: Redistribute, part: PartSeconds, covers: Covers) -> None:
        """Add a redistribution.

        Gathers of parameters are counted in bytes, others in the seconds that nothing hides.
        """
        graph = self.model.graph
        forward, backward = chain_collectives(graph, step, self.mesh.shape)
        if graph.tensors[step.tensor].role is Role.PARAMETER:
            # Experts are shared out among fewer ranks, and counted by themselves.
            if not step.tensor.endswith(EXPERT_WEIGHTS):
                part.gathered += sum(c.nbytes for c in forward)
            return
        ahead = sum(self.prices.seconds(c.kind, c.axes, c.nbytes) for c in forward)
        back = sum(self.prices.seconds(c.kind, c.axes, c.nbytes) for c in backward)
        part.issued_forward += len(forward)
        part.issued_backward += len(backward)
        moved = covers.moved(step, ahead, back, self.c.tensor)
        slowdown = SLOWDOWN["nccl"]
        part.moved_forward += moved.ahead.seconds(slowdown)
        part.moved_backward += moved.back.seconds(slowdown) + moved.repeated.seconds(slowdown)

    def operator(self, step: Compute) -> Seconds:
        """Return an operator's seconds forward and backward, and of gradients of parameters."""
        sizes = [1.0] * (len(step.decision.rule.factors) if step.decision.rule else 0)
        for option, axis in zip(step.decision.options, self.mesh.axes, strict=True):
            for factor in (option.factor, *option.partners):
                if factor >= 0:
                    sizes[factor] *= axis.size
        if step.operator.kind == "aten.cross_entropy_loss.default":
            return self._loss(step, sizes)
        key = (
            step.operator.name,
            tuple(sizes),
            step.decision.options,
            self.cluster.device,
            self.c.habits.fused,
            self.cluster.framework.summed,
        )
        if key not in self.seconds:
            self.seconds[key] = step_seconds(step, self.analysis, self.prices, self.inside)
        return self.seconds[key]

    def _filled(self, step: Compute, seconds: Seconds) -> Seconds:
        """An operator's seconds with an additional pass over every tensor that it makes."""
        if RULES[step.operator.kind].view:
            return seconds
        tensors = self.model.graph.tensors
        mesh = self.mesh.shape
        device = self.cluster.device
        made = sum(
            local_bytes(p, tensors[n].bytes, mesh)
            for n, p in zip(step.operator.outputs, step.decision.outputs, strict=True)
        )
        given = zip(step.operator.inputs, step.decision.inputs, strict=True)
        back = sum(
            local_bytes(layout, tensors[name].bytes, mesh)
            for name, layout in given
            if name in self.analysis.gradients
        )
        ahead, behind = (float(memory_seconds(nbytes, device)) for nbytes in (made, back))
        return Seconds(seconds.forward + ahead, seconds.backward + behind, seconds.weight)

    def _loss(self, step: Compute, degrees: Sequence[float]) -> Seconds:
        """Seconds of the loss's kernels, without the cast, which is an operator of its own."""
        logits = float(self.model.graph.tensors[step.operator.inputs[0]].size)
        for degree in degrees:
            logits /= degree
        # The cast reads 2 bytes of a logit and writes 4.
        cast = 6.0 if self.loss.wide else 0.0
        passes = (self.loss.forward - cast, self.loss.backward - cast)
        forward, backward = (
            float(memory_seconds(max(nbytes, 0.0) * logits, self.cluster.device))
            for nbytes in passes
        )
        return Seconds(forward, backward, 0.0)

    def stored(self, program: Program, parts: dict[str, PartSeconds]) -> None:
        """Add the elements of parameters that a device uses (ZeRO-3 stores a share of them)."""
        for tensor in program.graph.parameters:
            own = tensor.name.endswith(EXPERT_WEIGHTS)
            layout = program.assignment.storage[tensor.name]
            apart = [
                i
                for i, a in enumerate(self.axes)
                if a.outside == "data" or (own and a.inside != "inner")
            ]
            used = tuple(p for a, p in enumerate(layout) if a not in apart)
            sizes = [s for a, s in enumerate(self.mesh.shape) if a not in apart]
            elements = local_bytes(used, tensor.bytes, sizes) / DTYPE_BYTES[tensor.dtype]
            part = parts[self.model.part(tensor.name)]
            part.parameters += elements
            differ = own and (self.c.expert > 1 or self.c.inner != self.c.tensor)
            part.experts += elements if differ else 0.0
            nbytes = elements * DTYPE_BYTES[tensor.dtype]
            if self.c.zero == 3 and own:
                part.gathered += nbytes
                part.gathered_experts += nbytes if differ else 0.0
            elif self.c.zero == 3 and not any(layout[a].kind is Kind.SPLIT for a in apart):
                # No dim divides, so the program gathers nothing; the framework cuts the shards from
                # the flat parameter.
                part.gathered += nbytes
