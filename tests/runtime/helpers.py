"""Small hand-made graphs, and random plans for them out of the candidates of the rules."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.ir import Graph, Operator, Ref, Role, Tensor, Value
from autopar.runtime.checking.check import one_device
from autopar.runtime.module.held_shards import Values
from autopar.runtime.module.parallel_module import ModuleOptions, ParallelModule
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.candidates import options_of, strategies_of
from autopar.sharding.equal_parts import split_variants
from autopar.sharding.layout import Layout, replicated
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.program import Assignment, Decision, Program
from autopar.sharding.program_builder import build_program
from autopar.sharding.redistribution import cheapest_chain, without_gradient
from autopar.sharding.rules import Call, preamble, rule_of, tensors_with_gradient
from tests.sharding.storing import storage_layouts


def mesh_of(sizes: tuple[int, ...]) -> Mesh:
    """A mesh with axes a0, a1, ..."""
    return Mesh(axes=tuple(Axis(name=f"a{i}", size=size) for i, size in enumerate(sizes)))


class GraphBuilder:
    """Collects tensors and operators; every method returns the name of what it makes."""

    def __init__(self, dtype: str = "float64") -> None:
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self.inputs: list[str] = []

    def input(self, name: str, *shape: int, dtype: str | None = None) -> str:
        self.inputs.append(name)
        self.tensors[name] = Tensor(
            name=name, shape=shape, dtype=dtype or self.dtype, role=Role.INPUT
        )
        return name

    def parameter(self, name: str, *shape: int, trainable: bool = True) -> str:
        self.tensors[name] = Tensor(
            name=name, shape=shape, dtype=self.dtype, role=Role.PARAMETER, trainable=trainable
        )
        return name

    def constant(self, name: str, *shape: int, dtype: str | None = None) -> str:
        self.tensors[name] = Tensor(
            name=name, shape=shape, dtype=dtype or self.dtype, role=Role.CONSTANT
        )
        return name

    def call(
        self,
        kind: str,
        shapes: list[tuple[int, ...]],
        /,
        *,
        makes: str | None = None,
        name: str = "",
        **attributes: object,
    ) -> list[str]:
        """An operator; attributes that are strings naming tensors become its inputs; `makes` is the
        outputs' dtype.
        """
        inputs: list[str] = []

        def convert(value: object) -> Value:
            if isinstance(value, tuple | list):
                return tuple(convert(item) for item in value)
            if isinstance(value, str) and value in self.tensors:
                inputs.append(value)
                return Ref(len(inputs) - 1)
            assert value is None or isinstance(value, int | float | str)
            return value

        name = name or f"{kind.split('.')[1]}_{len(self.operators)}"
        converted = {key: convert(value) for key, value in attributes.items()}
        outputs = tuple(
            f"{name}.{i}" if len(shapes) > 1 else f"{name}_out" for i in range(len(shapes))
        )
        for output, shape in zip(outputs, shapes, strict=True):
            self.tensors[output] = Tensor(name=output, shape=shape, dtype=makes or self.dtype)
        self.operators.append(
            Operator(
                name=name, kind=kind, inputs=tuple(inputs), outputs=outputs, attributes=converted
            )
        )
        return list(outputs)

    def one(
        self,
        kind: str,
        shape: tuple[int, ...],
        /,
        *,
        makes: str | None = None,
        **attributes: object,
    ) -> str:
        return self.call(kind, [shape], makes=makes, **attributes)[0]

    def finish(self, name: str, outputs: list[str]) -> Graph:
        """The graph with the mean square of the first output as its loss."""
        count = self.tensors[outputs[0]].size
        loss = self.one("autopar.mean_square", (), x=outputs[0], count=count)
        return Graph(
            name=name,
            tensors=self.tensors,
            operators=tuple(self.operators),
            inputs=tuple(self.inputs),
            outputs=tuple(outputs),
            loss=loss,
        )


def flat_price(kind: str, axis: int, nbytes: int) -> float:
    """A price for chains in tests: a latency and a bandwidth."""
    return 1e-5 + nbytes * 1e-9


def random_program(graph: Graph, mesh: Mesh, seed: int, *, train: bool = True) -> Program:
    """A program with a random strategy of every operator and random storage of parameters."""
    rng = random.Random(seed)
    gradients = tensors_with_gradient(graph, train=train)
    cold = preamble(graph)
    calls = {op.name: Call.of(graph, op) for op in graph.operators if op.name not in cold}
    rules = {name: rule_of(call) for name, call in calls.items()}
    factor_parts, tensor_parts = split_variants(graph, rules)
    decisions: dict[str, Decision] = {}
    for op in graph.operators:
        if op.name in cold:
            decisions[op.name] = Decision.cold(op, len(mesh.axes))
            continue
        options = options_of(calls[op.name], rules[op.name], gradients, factor_parts[op.name])
        strategies = strategies_of(rules[op.name], options, mesh.shape)
        pick = rng.randrange(len(strategies.choices))
        inputs, outputs = strategies.layouts(pick)
        chosen = tuple(options[i] for i in strategies.choices[pick])
        decisions[op.name] = Decision(
            options=chosen, rule=rules[op.name], inputs=inputs, outputs=outputs
        )
    storage = {}
    for tensor in graph.parameters:
        storage[tensor.name] = rng.choice(
            storage_layouts(tensor.shape, mesh.shape, tensor_parts.get(tensor.name, {}))
        )
    made = {
        name: layout
        for op in graph.operators
        for name, layout in zip(op.outputs, decisions[op.name].outputs, strict=True)
    }
    whole = replicated(len(mesh.axes))
    outputs_at = {name: made[name] if rng.random() < 0.5 else whole for name in graph.outputs}
    if graph.loss:
        outputs_at[graph.loss] = whole
    assignment = Assignment(
        mesh=mesh,
        decisions=decisions,
        storage=storage,
        outputs=outputs_at,
        chains={},
        gradients=gradients,
    )
    return build_program(graph, replace(assignment, chains=_chains(graph, assignment, made)))


def _chains(
    graph: Graph, assignment: Assignment, made: Mapping[str, Layout]
) -> dict[str, tuple[tuple[Layout, ...], ...]]:
    """One chain for each distinct layout in which a tensor is needed."""
    mesh = assignment.mesh
    whole = replicated(len(mesh.axes))
    needed: dict[str, dict[Layout, None]] = {}
    for op in graph.operators:
        for name, layout in zip(op.inputs, assignment.decisions[op.name].inputs, strict=True):
            needed.setdefault(name, {})[layout] = None
    for name, layout in assignment.outputs.items():
        needed.setdefault(name, {})[layout] = None
    results = {}
    for name, layouts in needed.items():
        source = made.get(name, assignment.storage.get(name, whole))
        tensor = graph.tensors[name]
        flows = name in assignment.gradients
        chains = []
        for layout in layouts:
            if layout == source:
                continue
            target = layout if flows else without_gradient(layout)
            itemsize = tensor.bytes // max(tensor.size, 1)
            chains.append(
                cheapest_chain(
                    source, target, tensor.shape, itemsize, mesh.shape, flat_price, gradient=flows
                )
            )
        results[name] = tuple(chains)
    return results


def alone(graph: Graph, values: Values, *, exact_random: bool = False) -> ParallelModule:
    """The graph on one device, ready to be trained."""
    program = one_device(graph, tensors_with_gradient(graph, train=True))
    return ParallelModule(
        program, DeviceGroups.single(), values, options=ModuleOptions(exact_random=exact_random)
    )


def random_values(graph: Graph, seed: int = 0) -> dict[str, torch.Tensor]:
    """Values of all parameters and float constants."""
    generator = torch.Generator().manual_seed(seed)
    return {
        tensor.name: torch.randn(
            tensor.shape, dtype=getattr(torch, tensor.dtype), generator=generator
        )
        * 0.3
        for tensor in graph.tensors.values()
        if tensor.role in (Role.PARAMETER, Role.CONSTANT)
    }


def random_inputs(graph: Graph, high: int = 8, seed: int = 1) -> list[torch.Tensor]:
    """Values of all inputs; integers below `high`."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for name in graph.inputs:
        tensor = graph.tensors[name]
        if tensor.is_float:
            out.append(
                torch.randn(tensor.shape, dtype=getattr(torch, tensor.dtype), generator=generator)
            )
        else:
            out.append(
                torch.randint(
                    0, high, tensor.shape, dtype=getattr(torch, tensor.dtype), generator=generator
                )
            )
    return out
