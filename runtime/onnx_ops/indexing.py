"""Operators that read or write at indices given as tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

Tensor = torch.Tensor
_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _wrap(indices: Tensor, size: int) -> Tensor:
    """Indices counted from the start: negative ones count from the end."""
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + size, indices)


def gather(*, data: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """Take the slices of a dim that the indices name."""
    # The index may have any number of dims: one look-up of all, then their shape.
    axis %= data.dim()
    flat = _wrap(indices.reshape(-1), data.shape[axis])
    return data.index_select(axis, flat).reshape(
        (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    )


def gather_elements(*, data: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """Take every element from the place along a dim that its index names."""
    return torch.gather(data, axis, _wrap(indices, data.shape[axis]))


def _flat_places(indices: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Index tuples over dims of `sizes` as places in their product."""
    place = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=indices.device)
    for i, size in enumerate(sizes):
        place = place * size + _wrap(indices[..., i], size)
    return place


def gather_nd(*, data: Tensor, indices: Tensor, batch_dims: int = 0) -> Tensor:
    """Take the slices that the innermost index tuples name."""
    depth = indices.shape[-1]
    batch = data.shape[:batch_dims]
    indexed = data.shape[batch_dims : batch_dims + depth]
    rest = data.shape[batch_dims + depth :]
    # The indexed dims become one, behind which the batch dims are one, too: a single look-up.
    place = _flat_places(indices, tuple(indexed))
    count = math.prod(batch)
    width = math.prod(indexed)
    place = (
        place.reshape(count, -1) + torch.arange(count, device=indices.device).unsqueeze(1) * width
    )
    picked = data.reshape(count * width, *rest).index_select(0, place.reshape(-1))
    return picked.reshape((*indices.shape[:-1], *rest))


def scatter_elements(
    *, data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, reduction: str = "none"
) -> Tensor:
    """A copy of the data with each update written at, or combined with, its index's place."""
    places = _wrap(indices, data.shape[axis])
    if reduction == "none":
        return data.scatter(axis, places, updates)
    return data.scatter_reduce(
        axis, places, updates, reduce=_REDUCTIONS[reduction], include_self=True
    )


def scatter_nd(
    *, data: Tensor, indices: Tensor, updates: Tensor, reduction: str = "none"
) -> Tensor:
    """A copy of the data with slices of updates written at, or combined with, their places."""
    depth = indices.shape[-1]
    rest = data.shape[depth:]
    place = _flat_places(indices, tuple(data.shape[:depth])).reshape(-1)
    flat = data.reshape(math.prod(data.shape[:depth]), -1)
    new = updates.reshape(place.numel(), flat.shape[1])
    if reduction == "none":
        return flat.index_copy(0, place, new).reshape(*data.shape[:depth], *rest)
    where = place.unsqueeze(1).expand(new.shape)
    reduced = flat.scatter_reduce(0, where, new, reduce=_REDUCTIONS[reduction], include_self=True)
    return reduced.reshape(data.shape)


def one_hot(*, indices: Tensor, depth: int, values: Tensor, axis: int = -1) -> Tensor:
    """`values[1]` at the index along a new dim, `values[0]` elsewhere."""
    axis %= indices.dim() + 1
    places = _wrap(indices, depth).unsqueeze(axis)
    shape = [depth if i == axis else 1 for i in range(indices.dim() + 1)]
    # Compared, not scattered: an index beyond the depth gives no hot element.
    hot = places == torch.arange(depth, device=indices.device).reshape(shape)
    return torch.where(hot, values[1], values[0])


def compress(*, input: Tensor, condition: Tensor, axis: int | None = None) -> Tensor:
    """The slices where the condition holds."""
    picks = torch.nonzero(condition).squeeze(1)
    if axis is None:
        return input.reshape(-1).index_select(0, picks)
    return input.index_select(axis, picks)


def non_zero(*, X: Tensor) -> Tensor:
    """The indices of the elements that are not zero, one row a dim."""
    return torch.nonzero(X).t()


def unique(
    *, X: Tensor, axis: int | None = None, sorted: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The distinct elements or slices.

    Also returns their first places, the number of each element's value among them, and their
    counts.
    """
    x = X.reshape(-1) if axis is None else X
    dim = 0 if axis is None else axis % X.dim()
    y, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=dim)
    inverse = inverse.reshape(-1)
    places = torch.arange(inverse.numel(), device=X.device)
    beyond = places.new_full((counts.numel(),), inverse.numel())
    first = beyond.scatter_reduce(0, inverse, places, reduce="amin")
    if not sorted:
        # Torch sorts the values; ONNX wants them in the order of their first places.
        order = first.argsort()
        ranks = torch.arange(order.numel(), device=X.device)
        rank = torch.empty_like(order).scatter(0, order, ranks)
        y = y.index_select(dim, order)
        first = first[order]
        inverse = rank[inverse]
        counts = counts[order]
    return y, first, inverse, counts


FUNCTIONS: Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "OneHot": one_hot,
    "Compress": compress,
    "NonZero": non_zero,
    "Unique": unique,
}
