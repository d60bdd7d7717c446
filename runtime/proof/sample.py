"""One call of an operator with real values: the start of a proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Graph, Operator, Ref, Role, Value
from autopar.ir import Tensor as GraphTensor
from autopar.runtime.operators.functions import arguments_of, function_of

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One call of an operator, with real values for its inputs.

    A `tolerance` above 1e-9 is for operators that cannot run in double precision.
    """

    kind: str
    graph: Graph
    values: tuple[Tensor, ...]
    note: str = ""
    tolerance: float = 1e-9

    @property
    def operator(self) -> Operator:
        """The operator that is called."""
        return self.graph.operators[0]

    def __str__(self) -> str:
        return f"{self.kind} {self.note or 'x'.join(str(list(v.shape)) for v in self.values)}"


@dataclass(kw_only=True)
class _Recorder:
    """Replaces tensors among the arguments by references."""

    inputs: list[Tensor] = field(default_factory=list)

    def value(self, argument: Any) -> Value:
        """An argument as an attribute of a graph's operator."""
        if isinstance(argument, Tensor):
            self.inputs.append(argument)
            return Ref(len(self.inputs) - 1)
        if isinstance(argument, list | tuple):
            return tuple(self.value(item) for item in argument)
        assert argument is None or isinstance(argument, int | float | str)
        return argument


def sample(kind: str, note: str = "", /, **arguments: Any) -> Sample:
    """A call of `kind` with these arguments by their formal names; dtypes are given as text."""
    recorder = _Recorder()
    attributes = {name: recorder.value(value) for name, value in arguments.items()}
    function = function_of(kind)
    inputs = tuple(f"in{i}" for i in range(len(recorder.inputs)))
    results = function(**arguments_of(function, attributes, recorder.inputs, CPU))
    outputs = list(results) if isinstance(results, list | tuple) else [results]
    names = tuple(f"out{i}" for i in range(len(outputs)))
    # Inputs are parameters, which have gradients and may lie in any layout.
    tensors = {
        **_described(inputs, recorder.inputs, Role.PARAMETER),
        **_described(names, outputs, Role.ACTIVATION),
    }
    operator = Operator(name="op", kind=kind, inputs=inputs, outputs=names, attributes=attributes)
    graph = Graph(name=kind, tensors=tensors, operators=(operator,), inputs=(), outputs=names)
    return Sample(kind=kind, graph=graph, values=tuple(recorder.inputs), note=note)


def _described(
    names: Sequence[str], values: Sequence[Tensor], role: Role
) -> dict[str, GraphTensor]:
    """The tensors of a graph that describe values."""
    return {
        name: GraphTensor(
            name=name,
            shape=tuple(value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            role=role,
        )
        for name, value in zip(names, values, strict=True)
    }
