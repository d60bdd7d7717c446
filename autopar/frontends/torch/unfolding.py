"""Writes the operators of layers in place of their calls, under the names of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import ModelError
from autopar.ir import Graph, Operator, Role, Tensor, needed_operators
from autopar.model import TorchModel

from .folding import CALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of the model at `path`, which computes what `model` says.

    `reads`: what its code has read of itself, by the parts' paths.
    """

    path: str
    model: TorchModel
    reads: Mapping[str, frozenset[str]]


def unfolded(model: TorchModel, layers: Sequence[Layer]) -> TorchModel:
    """The model with each call of a layer as the layer's operators, named by its path."""
    if any(layer.model.checks for layer in layers):
        raise ModelError("a layer asserts something of its data")
    writer = _Writer(model)
    for operator in model.graph.operators:
        if operator.kind == CALL:
            place = operator.attributes["place"]
            assert isinstance(place, int)
            writer.write(operator, layers[place])
        else:
            writer.add(operator)
    return writer.model(layers)


class _Writer:
    def __init__(self, model: TorchModel) -> None:
        self.outer = model
        graph = model.graph
        calls = {name for op in graph.operators if op.kind == CALL for name in op.outputs}
        self.tensors = {name: t for name, t in graph.tensors.items() if name not in calls}
        self.operators: list[Operator] = []
        self.renamed: dict[str, str] = {}
        self.constants: dict[str, Any] = dict(model.constants)
        self.buffers = dict.fromkeys(model.buffers)
        self.updates = dict(graph.updates)

    def add(self, operator: Operator) -> None:
        inputs = tuple(self.renamed.get(name, name) for name in operator.inputs)
        self.operators.append(replace(operator, inputs=inputs))

    def write(self, call: Operator, layer: Layer) -> None:
        """Write the operators of a layer that is called with the inputs of `call`."""
        graph = layer.model.graph
        given = [self.renamed.get(name, name) for name in call.inputs]
        names = dict(zip(graph.inputs, given, strict=True))
        for name, tensor in graph.tensors.items():
            if tensor.role is not Role.INPUT:
                names[name] = self._declare(layer, tensor)
        for op in graph.operators:
            self.operators.append(
                replace(
                    op,
                    name=_placed(layer.path, op.name),
                    inputs=tuple(names[name] for name in op.inputs),
                    outputs=tuple(names[name] for name in op.outputs),
                )
            )
        self.updates |= {names[old]: names[new] for old, new in graph.updates.items()}
        made = [name for name in layer.model.output_names if name is not None]
        self.renamed |= zip(call.outputs, (names[name] for name in made), strict=True)

    def _declare(self, layer: Layer, tensor: Tensor) -> str:
        if tensor.role is Role.ACTIVATION:
            name = _placed(layer.path, tensor.name)
        else:
            name = f"{layer.path}.{tensor.name}"
            name = self.outer.aliases.get(name, name)
        if tensor.name in layer.model.constants:
            self.constants[name] = layer.model.constants[tensor.name]
        if tensor.name in layer.model.buffers:
            self.buffers[name] = None
        self.tensors.setdefault(name, replace(tensor, name=name))
        return name

    def model(self, layers: Sequence[Layer]) -> TorchModel:
        graph = self.outer.graph
        outputs = tuple(self.renamed.get(name, name) for name in graph.outputs)
        updates = {old: self.renamed.get(new, new) for old, new in self.updates.items()}
        if len({operator.name for operator in self.operators}) < len(self.operators):
            # Numbers behind equal names would depend on the order of the calls.
            raise ModelError("a part of a layer is called outside of it as well")
        operators = needed_operators(self.operators, [*outputs, *updates.values()])
        reads = dict(self.outer.reads)
        for layer in layers:
            for part, names in layer.reads.items():
                reads[f"{layer.path}.{part}" if part else layer.path] = names
        return replace(
            self.outer,
            graph=Graph(
                name=graph.name,
                tensors=self.tensors,
                operators=operators,
                inputs=graph.inputs,
                outputs=tuple(dict.fromkeys(outputs)),
                updates=updates,
            ),
            constants=self.constants,
            buffers=tuple(self.buffers),
            output_names=tuple(
                None if name is None else self.renamed.get(name, name)
                for name in self.outer.output_names
            ),
            reads=reads,
        )


def _placed(path: str, name: str) -> str:
    """The name in the whole model of an operator or its result: `module.path/operator`."""
    return f"{path}.{name}" if "/" in name else f"{path}/{name}"
