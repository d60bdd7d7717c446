"""One call of an operator with real values: the start of a proof."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Graph, Operator, Ref, Role, Value
from autopar.ir import Tensor as GraphTensor

from ..functions import arguments_of, function_of

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
        return self.graph.operators[0]

    def __str__(self) -> str:
        return f"{self.kind} {self.note or 'x'.join(str(list(v.shape)) for v in self.values)}"


@dataclass(kw_only=True)
class _Recorder:
    """Replaces tensors among the arguments by references."""

    inputs: list[Tensor] = field(default_factory=list)

    def value(self, given: Any) -> Value:
        if isinstance(given, Tensor):
            self.inputs.append(given)
            return Ref(len(self.inputs) - 1)
        if isinstance(given, list | tuple):
            return tuple(self.value(item) for item in given)
        assert given is None or isinstance(given, int | float | str)
        return given


def sample(kind: str, note: str = "", /, **arguments: Any) -> Sample:
    """A call of `kind` with these arguments by their formal names; dtypes are given as text."""
    recorder = _Recorder()
    attributes = {name: recorder.value(value) for name, value in arguments.items()}
    function = function_of(kind)
    draft = Operator(name="op", kind=kind, inputs=tuple(f"in{i}" for i in range(len(recorder.inputs))), outputs=(), attributes=attributes)
    results = function(**arguments_of(function, attributes, recorder.inputs, CPU))
    outputs = list(results) if isinstance(results, list | tuple) else [results]
    made = tuple(f"out{i}" for i in range(len(outputs)))
    tensors: dict[str, GraphTensor] = {}
    for name, value, role in (
        *((n, v, Role.PARAMETER) for n, v in zip(draft.inputs, recorder.inputs, strict=True)),
        *((n, v, Role.ACTIVATION) for n, v in zip(made, outputs, strict=True)),
    ):
        tensors[name] = GraphTensor(name=name, shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."), role=role)
    operator = Operator(name="op", kind=kind, inputs=draft.inputs, outputs=made, attributes=attributes)
    graph = Graph(name=kind, tensors=tensors, operators=(operator,), inputs=(), outputs=made)
    return Sample(kind=kind, graph=graph, values=tuple(recorder.inputs), note=note)
