"""Reads what leaves every element in place as a view that can be split.

An index by counts, as of masks made by `torch.vmap`: `mask[arange(b)[:, None, None, None],
arange(s)]` is `mask.view(b, 1, 1, s)`. And parts that are put together again, as features of images
are: `cat(unbind(x))` is `x.flatten(0, 1)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir import Graph, Operator, Ref, Tensor, needed_operators

_INDEX = "aten.index.Tensor"
_MOVED = frozenset({"aten.unsqueeze.default", "aten.view.default", "aten.reshape.default"})
_JOIN = "aten.cat.default"
_TAKEN_APART = frozenset(
    {"aten.unbind.int", "aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default"}
)
_RANGES = frozenset({"aten.arange.default", "aten.arange.start"})


def read_as_views(graph: Graph) -> Graph:
    """Make a reshape of every index whose index tensors count along the indexed dims, in order, and
    of all parts of a tensor that are joined in order.
    """
    producers = {name: op for op in graph.operators for name in op.outputs}
    counts: set[str] = set()
    operators = []
    for operator in graph.operators:
        if _counts(operator, counts, graph.tensors):
            counts.update(operator.outputs)
        source = _rejoined(operator, producers, graph.tensors)
        if _in_place(operator, counts, graph.tensors):
            source = operator.inputs[0]
        operators.append(_as_view(operator, source, graph.tensors) if source else operator)
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


def _rejoined(
    operator: Operator, producers: Mapping[str, Operator], tensors: Mapping[str, Tensor]
) -> str | None:
    """The tensor whose parts an operator joins, all of them in their order and along their dim."""
    maker = producers.get(operator.inputs[0]) if operator.inputs else None
    if (
        operator.kind != _JOIN
        or maker is None
        or maker.kind not in _TAKEN_APART
        or operator.inputs != maker.outputs
    ):
        return None
    shape = tensors[maker.inputs[0]].shape
    along = maker.attributes.get("dim", 0)
    joined = operator.attributes.get("dim", 0)
    if not isinstance(along, int) or not isinstance(joined, int):
        return None
    # A dim that is taken apart whole comes back as the outer part of the one that follows.
    same = along % len(shape) == joined % len(tensors[operator.outputs[0]].shape)
    return maker.inputs[0] if same else None


def _as_view(operator: Operator, source: str, tensors: Mapping[str, Tensor]) -> Operator:
    shape = tensors[operator.outputs[0]].shape
    return replace(
        operator,
        kind="aten.reshape.default",
        inputs=(source,),
        attributes={"self": Ref(0), "shape": shape},
    )
