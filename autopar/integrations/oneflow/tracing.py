"""Traces a call of a torch function into operators.

It runs on shapes alone, and is recorded before torch decomposes operators, as the rules know them.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autopar.errors import UsageError
from autopar.ir import Graph, Operator, Ref, Role, Tensor, Value

_PLACEMENT_ARGUMENTS = frozenset(
    {"device", "layout", "memory_format", "pin_memory", "non_blocking"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The operators of a call as a graph over `in0`, `in1`, ....

    `results`: its tensors, or other results.
    """

    graph: Graph
    results: tuple[Any, ...]
    spec: pytree.TreeSpec


def trace(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Traced:
    """Trace `function(*inputs)`; the inputs are on the meta device."""
    structure: dict[str, pytree.TreeSpec] = {}

    def flat(*values: torch.Tensor) -> list[Any]:
        leaves, structure["spec"] = pytree.tree_flatten(function(*values))
        return leaves

    with torch.no_grad():
        module = make_fx(flat, tracing_mode="real", pre_dispatch=True)(*inputs)
    reader = _Reader(module, inputs)
    results = reader.read()
    tensors = reader.tensors
    operators = tuple(reader.operators)
    outputs = tuple(
        dict.fromkeys(name for name in results if isinstance(name, str) and name in tensors)
    )
    graph = Graph(
        name="call",
        tensors=tensors,
        operators=operators,
        inputs=tuple(reader.inputs),
        outputs=outputs,
    )
    return Traced(graph=graph, results=tuple(results), spec=structure["spec"])


class _Reader:
    """Walks the trace, node by node, with each name's value on the meta device."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        self.module = module
        self.given = list(inputs)
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self.inputs: list[str] = []
        self.names: dict[fx.Node, Any] = {}
        self.values: dict[fx.Node, Any] = {}

    def read(self) -> list[Any]:
        """The names of the call's results."""
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                name = f"in{len(self.inputs)}"
                self.values[node] = self.given[len(self.inputs)]
                self.names[node] = self._declare(name, self.values[node], Role.PARAMETER)
                self.inputs.append(name)
            elif node.op == "output":
                given = node.args[0]
                assert isinstance(given, list | tuple)
                return [
                    self.names[value] if isinstance(value, fx.Node) else value for value in given
                ]
            elif node.op == "call_function" and node.target is python_operator.getitem:
                source, index = node.args
                assert isinstance(source, fx.Node) and isinstance(index, int)
                self.names[node] = self.names[source][index]
                self.values[node] = self.values[source][index]
            elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                self._operator(node, node.target)
            else:
                raise UsageError(
                    f"a call holds {node.target}, a tensor that is not global: bring it there with "
                    "autopar.to_global first"
                )
        raise AssertionError("a trace ends with its output")

    def _declare(self, name: str, value: torch.Tensor, role: Role = Role.ACTIVATION) -> str:
        dtype = str(value.dtype).removeprefix("torch.")
        self.tensors[name] = Tensor(
            name=name,
            shape=tuple(value.shape),
            dtype=dtype,
            role=role,
            trainable=role is Role.PARAMETER,
        )
        return name

    def _operator(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        if any(
            a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments
        ):
            raise UsageError(
                f"{target} changes a global tensor in place inside a function; use the form that "
                "gives a new one"
            )
        given = dict(
            zip([a.name for a in target._schema.arguments], node.args, strict=False)
        ) | dict(node.kwargs)
        inputs: list[str] = []
        attributes = {
            name: self._value(value, inputs)
            for name, value in given.items()
            if name not in _PLACEMENT_ARGUMENTS
        }
        name = f"op{len(self.operators)}"
        made = target(*_real(node.args, self.values), **_real(node.kwargs, self.values))
        self.values[node] = made
        several = isinstance(made, list | tuple)
        outputs = tuple(
            self._declare(f"{name}:{i}", value)
            for i, value in enumerate(made if several else [made])
        )
        self.names[node] = list(outputs) if several else outputs[0]
        self.operators.append(
            Operator(
                name=name,
                kind=str(target),
                inputs=tuple(inputs),
                outputs=outputs,
                attributes=attributes,
            )
        )

    def _value(self, value: Any, inputs: list[str]) -> Value:
        if isinstance(value, fx.Node):
            inputs.append(self.names[value])
            return Ref(len(inputs) - 1)
        if isinstance(value, list | tuple):
            return tuple(self._value(item, inputs) for item in value)
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise UsageError(f"an argument of type {type(value).__name__} cannot be read")


def _real(arguments: Any, values: dict[fx.Node, Any]) -> Any:
    return fx.map_arg(arguments, lambda node: values[node])
