"""Reads an index by counts, which leaves every element in place, as a view that can be split.

Masks made by `torch.vmap` come so: `mask[arange(b)[:, None, None, None], arange(s)]` is
`mask.view(b, 1, 1, s)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir import Graph, Operator, Ref, Tensor, needed_operators

_INDEX = "aten.index.Tensor"
_MOVED = frozenset({"aten.unsqueeze.default", "aten.view.default", "aten.reshape.default"})
_RANGES = frozenset({"aten.arange.default", "aten.arange.start"})


def read_as_views(graph: Graph) -> Graph:
    """Make a reshape of every index whose index tensors count along the indexed dims, in order."""
    counts: set[str] = set()
    operators = []
    for operator in graph.operators:
        if _counts(operator, counts, graph.tensors):
            counts.update(operator.outputs)
        operators.append(
            _as_view(operator, graph.tensors)
            if _in_place(operator, counts, graph.tensors)
            else operator
        )
    needed = {*graph.outputs, *graph.updates.values(), *((graph.loss,) if graph.loss else ())}
    return replace(graph, operators=needed_operators(operators, needed))


def _counts(operator: Operator, counts: set[str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether an operator gives 0, 1, ..., n - 1 along a dim of n; all other dims have size 1."""
    given = operator.attributes
    if operator.kind in _RANGES:
        return given.get("start", 0) == 0 and given.get("end") == tensors[operator.outputs[0]].size
    if len(operator.inputs) != 1 or operator.inputs[0] not in counts:
        return False
    same = tensors[operator.outputs[0]].dtype == tensors[operator.inputs[0]].dtype
    return operator.kind in _MOVED or (
        operator.kind == "aten.add.Tensor" and given.get("other") == 0 and same
    )


def _in_place(operator: Operator, counts: set[str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether an index takes every element of its first dims, in their order.

    The dims behind are taken whole.
    """
    indices = operator.attributes.get("indices")
    if (
        operator.kind != _INDEX
        or not isinstance(indices, tuple)
        or operator.attributes.get("self") != Ref(0)
    ):
        return False
    shape = tensors[operator.inputs[0]].shape
    depth = len(tensors[operator.outputs[0]].shape)
    last = -1
    behind = len(shape) - len(indices)
    for size, index in zip(shape, indices, strict=False):
        if not isinstance(index, Ref) or operator.inputs[index.index] not in counts:
            return False
        places = tensors[operator.inputs[index.index]].shape
        if max(places, default=1) != size:
            return False
        if size > 1:
            dim = depth - behind - len(places) + places.index(size)
            if dim <= last:
                return False
            last = dim
    return True


def _as_view(operator: Operator, tensors: Mapping[str, Tensor]) -> Operator:
    shape = tensors[operator.outputs[0]].shape
    return replace(
        operator,
        kind="aten.reshape.default",
        inputs=operator.inputs[:1],
        attributes={"self": Ref(0), "shape": shape},
    )
