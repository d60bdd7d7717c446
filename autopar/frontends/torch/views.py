"""Reads what leaves every element in place as a view that can be split.

An index by counts, as of masks made by `torch.vmap`: `mask[arange(b)[:, None, None, None],
arange(s)]` is `mask.view(b, 1, 1, s)`. And parts that are put together again, as features of images
are: `cat(unbind(x))` is `x.flatten(0, 1)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir import Graph, Operator, Ref, Tensor, Value, needed_operators

_INDEX = "aten.index.Tensor"
_PUT = "aten.index_put.default"
_ADD = "aten.add.Tensor"
_MOVED = frozenset({"aten.unsqueeze.default", "aten.view.default", "aten.reshape.default"})
JOIN = "aten.cat.default"
TAKEN_APART = frozenset(
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
        operator.kind != JOIN
        or maker is None
        or maker.kind not in TAKEN_APART
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


def read_as_additions(graph: Graph) -> Graph:
    """Make an addition of every write of rows that are those of the same places, plus others.

    `x[mask] = x[mask] + rows` is `x + zeros.masked_scatter(mask, rows)`. How many rows are selected
    is a matter of the data; how many are put in place is not, so that it can be split.
    """
    producers = {name: op for op in graph.operators for name in op.outputs}
    tensors = dict(graph.tensors)
    operators: list[Operator] = []
    for operator in graph.operators:
        rows = _added(operator, producers, tensors)
        operators += [operator] if rows is None else _addition(operator, rows, tensors)
    if len(operators) == len(graph.operators):
        return graph
    needed = {*graph.outputs, *graph.updates.values(), *((graph.loss,) if graph.loss else ())}
    return replace(graph, tensors=tensors, operators=needed_operators(operators, needed))


def _added(
    put: Operator, producers: Mapping[str, Operator], tensors: Mapping[str, Tensor]
) -> str | None:
    """The rows that a write adds to those that are there."""
    if put.kind != _PUT or put.attributes.get("accumulate") or not _by_mask(put, tensors):
        return None
    add = producers.get(put.inputs[-1])
    if (
        add is None
        or add.kind != _ADD
        or len(add.inputs) != 2
        or add.attributes.get("alpha", 1) != 1
    ):
        return None
    for own, other in (add.inputs, add.inputs[::-1]):
        select = producers.get(own)
        if select is not None and select.kind == _INDEX and select.inputs == put.inputs[:2]:
            same = tensors[other].shape == tensors[own].shape and _by_mask(select, tensors)
            return other if same else None
    return None


def _by_mask(operator: Operator, tensors: Mapping[str, Tensor]) -> bool:
    """Whether an operator's places are where one mask of the first dims is true."""
    indices = operator.attributes.get("indices")
    return (
        operator.attributes.get("self") == Ref(0)
        and indices == (Ref(1),)
        and tensors[operator.inputs[1]].dtype == "bool"
    )


def _addition(put: Operator, rows: str, tensors: dict[str, Tensor]) -> list[Operator]:
    """The operators that put rows in place and add them; the last one stands for the write."""
    operators: list[Operator] = []
    whole = tensors[put.inputs[0]]
    mask = tensors[put.inputs[1]]

    def add(what: str, like: Tensor, inputs: tuple[str, ...], **attributes: Value) -> str:
        name = f"{put.name}.{what.split('.')[1]}"
        result = replace(like, name=f"{name}:0", trainable=False)
        tensors[result.name] = result
        operators.append(
            Operator(
                name=name, kind=what, inputs=inputs, outputs=(result.name,), attributes=attributes
            )
        )
        return result.name

    made = tensors[put.outputs[0]]
    behind = (1,) * (len(whole.shape) - len(mask.shape))
    deep = replace(made, shape=(*mask.shape, *behind), dtype=mask.dtype)
    places = add("aten.reshape.default", deep, (mask.name,), self=Ref(0), shape=deep.shape)
    zeros = add("aten.zeros_like.default", made, (whole.name,), self=Ref(0))
    given: dict[str, Value] = {"self": Ref(0), "mask": Ref(1), "source": Ref(2)}
    placed = add("aten.masked_scatter.default", made, (zeros, places, rows), **given)
    both: dict[str, Value] = {"self": Ref(0), "other": Ref(1)}
    return [*operators, replace(put, kind=_ADD, inputs=(whole.name, placed), attributes=both)]
