"""Operators that read or write at indices given as tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from autopar.ir import Role

from .symbols import Symbol, where
from .trace import Asked

_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def gather(*, data: Symbol, indices: Symbol, axis: int = 0) -> Symbol:
    """Take the slices of a dim that the indices name."""
    axis %= data.rank
    size = data.shape[axis]
    known = indices.val.known()
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    if known is not None and known.size == 1 and not indices.rank:
        return data.select(axis, int(known.reshape(())) % size)
    # The rows of a stored table are an embedding, whose indices count from the start.
    if data.val.role is Role.PARAMETER and data.rank == 2 and axis == 0 and indices.rank:
        return data.new("embedding.default", shape, weight=data, indices=indices)
    # The index may have any number of dims: one look-up of all, then their shape.
    return data.index_select(axis, indices.reshape(indices.size).wrapped(size)).reshape(*shape)


def gather_elements(*, data: Symbol, indices: Symbol, axis: int = 0) -> Symbol:
    """Take every element from the place along a dim that its index names."""
    return data.gather(axis, indices.wrapped(data.shape[axis]))


def _flat_places(indices: Symbol, sizes: tuple[int, ...]) -> Symbol:
    """Index tuples over dims of `sizes` as places in their product."""
    place = indices.select(-1, 0).wrapped(sizes[0])
    for i, size in enumerate(sizes[1:], 1):
        place = place * size + indices.select(-1, i).wrapped(size)
    return place


def gather_nd(*, data: Symbol, indices: Symbol, batch_dims: int = 0) -> Symbol:
    """Take the slices that the innermost index tuples name."""
    depth = indices.shape[-1]
    count = math.prod(data.shape[:batch_dims])
    indexed = data.shape[batch_dims : batch_dims + depth]
    rest = data.shape[batch_dims + depth :]
    # The indexed dims become one; the batch dims are one before them: a single look-up.
    place = _flat_places(indices, indexed)
    width = math.prod(indexed)
    flat = data.reshape(count * width, *rest)
    if count > 1:
        place = place.reshape(count, -1) + data.constant(np.arange(count)[:, None] * width)
    picked = flat.index_select(0, place.reshape(place.size))
    return picked.reshape(*indices.shape[:-1], *rest)


def scatter_elements(
    *, data: Symbol, indices: Symbol, updates: Symbol, axis: int = 0, reduction: str = "none"
) -> Symbol:
    """A copy of the data with each update written at, or combined with, its index's place."""
    places = indices.wrapped(data.shape[axis])
    if reduction == "none":
        return data.scatter(axis, places, updates)
    return data.scatter_reduce(axis, places, updates, _REDUCTIONS[reduction])


def scatter_nd(
    *, data: Symbol, indices: Symbol, updates: Symbol, reduction: str = "none"
) -> Symbol:
    """A copy of the data with slices of updates written at, or combined with, their places."""
    depth = indices.shape[-1]
    place = _flat_places(indices, data.shape[:depth])
    flat = data.reshape(math.prod(data.shape[:depth]), math.prod(data.shape[depth:]))
    new = updates.reshape(place.size, flat.shape[1])
    places = place.reshape(place.size, 1).expand(*new.shape)
    if reduction == "none":
        return flat.scatter(0, places, new).reshape(*data.shape)
    return flat.scatter_reduce(0, places, new, _REDUCTIONS[reduction]).reshape(*data.shape)


def one_hot(*, indices: Symbol, depth: int, values: Symbol, axis: int = -1) -> Symbol:
    """`values[1]` at the index along a new dim, `values[0]` elsewhere."""
    axis %= indices.rank + 1
    shape = [depth if i == axis else 1 for i in range(indices.rank + 1)]
    # Compared, not scattered: an index beyond the depth gives no hot element.
    places = indices.wrapped(depth).unsqueeze(axis)
    hot = places.equals(indices.constant(np.arange(depth).reshape(shape)))
    return where(hot, values.select(0, 1), values.select(0, 0))


def compress(asked: Asked, *, input: Symbol, condition: Symbol, axis: int | None = None) -> Symbol:
    """The slices where the condition holds."""
    size = math.prod(asked.shape)
    source = input.reshape(input.size) if axis is None else input
    axis = axis or 0
    count = size // max(1, source.size // source.shape[axis])
    picks = condition.new("nonzero.default", (count, 1), "int64", self=condition)
    return source.index_select(axis, picks.squeeze(1))


def non_zero(asked: Asked, *, X: Symbol) -> Symbol:
    """The indices of the elements that are not zero, one row a dim."""
    size = math.prod(asked.shape)
    x = X if X.rank else X.reshape(1)
    places = x.new("nonzero.default", (size // x.rank, x.rank), "int64", self=x)
    return places.t if X.rank else places.t.cut(0, 0, 0)


def unique(
    asked: Asked, *, X: Symbol, axis: int | None = None, sorted: int = 1
) -> tuple[Symbol, ...]:
    """The distinct elements or slices.

    Also returns their first places, the number of each element's value among them, and their
    counts.
    """
    x = X.reshape(X.size) if axis is None else X
    dim = 0 if axis is None else axis % X.rank
    shape = asked.shape
    results = [(shape, x.dtype), ((x.shape[dim],), "int64"), ((shape[dim],), "int64")]
    given = {"dim": dim, "return_inverse": True, "return_counts": True}
    y, inverse, counts = x.several("unique_dim.default", results, self=x, **given)
    places = x.constant(np.arange(x.shape[dim]))
    beyond = x.constant(np.full(shape[dim], x.shape[dim]))
    first = beyond.scatter_reduce(0, inverse, places, "amin")
    if not sorted:
        # Torch sorts the values; ONNX wants them in the order of their first places.
        order = first.new("argsort.default", self=first)
        ranks = x.constant(np.arange(shape[dim]))
        rank = ranks.scatter(0, order, ranks)
        y = y.index_select(dim, order)
        first = first.index_select(0, order)
        inverse = rank.index_select(0, inverse)
        counts = counts.index_select(0, order)
    return y, first, inverse, counts


FUNCTIONS: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "ScatterElements": scatter_elements,
    "Scatter": scatter_elements,
    "ScatterND": scatter_nd,
    "OneHot": one_hot,
}
ASKING: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "Compress": compress,
    "NonZero": non_zero,
    "Unique": unique,
}
"""Operators whose results' sizes depend on values: they are those that the file declares."""
