"""Reads a convolution that pads both ends, and of which the rows behind the input's are cut off, as
the causal one that it is: its rows can then be split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir import Graph, Operator, Tensor, Value, needed_operators

KIND = "autopar.causal_conv1d"
_CONVOLUTION = "aten.conv1d.default"
_SLICE = "aten.slice.Tensor"


def read_as_causal(graph: Graph) -> Graph:
    """Make one operator of every convolution whose readers take its first rows alone."""
    readers: dict[str, list[Operator]] = {}
    for operator in graph.operators:
        for name in operator.inputs:
            readers.setdefault(name, []).append(operator)
    results = {*graph.outputs, *graph.updates.values()}
    causal: dict[str, Operator] = {}
    instead: dict[str, str] = {}
    tensors = dict(graph.tensors)
    for operator in graph.operators:
        if operator.kind != _CONVOLUTION or not _pads_all(operator, tensors):
            continue
        made = operator.outputs[0]
        rows = tensors[operator.inputs[0]].shape[-1]
        taken = readers.get(made, [])
        cut = all(_takes_first(reader, graph.tensors, rows) for reader in taken)
        if taken and cut and made not in results:
            tensors[made] = replace(graph.tensors[taken[0].outputs[0]], name=made)
            attributes = {n: v for n, v in operator.attributes.items() if n != "padding"}
            causal[operator.name] = replace(operator, kind=KIND, attributes=attributes)
            instead |= {reader.outputs[0]: made for reader in taken}
    if not causal:
        return graph
    operators = [
        replace(op, inputs=tuple(instead.get(name, name) for name in op.inputs))
        for op in (causal.get(op.name, op) for op in graph.operators)
        if not set(op.outputs) & instead.keys()
    ]
    updates = {old: instead.get(new, new) for old, new in graph.updates.items()}
    outputs = tuple(instead.get(name, name) for name in graph.outputs)
    return replace(
        graph,
        tensors=tensors,
        operators=needed_operators(operators, [*outputs, *updates.values()]),
        outputs=outputs,
        updates=updates,
    )


def _pads_all(operator: Operator, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a convolution along one dim pads as many rows as its window reaches back."""
    kernel = tensors[operator.inputs[1]].shape[-1]
    given = operator.attributes
    reach = (kernel - 1) * _number(given.get("dilation"), 1)
    return (
        reach > 0
        and _number(given.get("stride"), 1) == 1
        and _number(given.get("padding"), 0) == reach
    )


def _takes_first(operator: Operator, tensors: Mapping[str, Tensor], rows: int) -> bool:
    """Whether an operator takes the first `rows` of the last dim."""
    if operator.kind != _SLICE:
        return False
    shape = tensors[operator.inputs[0]].shape
    dim = operator.attributes.get("dim", 0)
    return (
        isinstance(dim, int)
        and dim % len(shape) == len(shape) - 1
        and operator.attributes.get("start") in (None, 0)
        and operator.attributes.get("step", 1) == 1
        and tensors[operator.outputs[0]].shape[-1] == rows
    )


def _number(value: Value, default: int) -> int:
    """The one size of a window along one dim."""
    if isinstance(value, tuple):
        (value,) = value
    return value if isinstance(value, int) else default
