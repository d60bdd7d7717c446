"""Bands: values [queries, keys] of which each query has one piece of the keys apart from the rest.

For each query the piece is given by its first key and the one behind its last: memory for the
queries, and none for queries times keys. Comparisons of counted places are bands, and triangles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

MOST = 2**24
"""The most elements of a value that is laid out: a mask of 4096 places, 128 MiB of integers."""
# The comparison, and as it reads from its right side.
COMPARED = {
    f"aten.{name}.Tensor": (name, turned)
    for name, turned in {"eq": "eq", "le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A value [..., queries, keys]: `inside` for `low <= key < high`, and `outside` elsewhere.

    `low`, `high`: [..., queries or 1, 1], within 0 .. `keys`. `inside`, `outside`: one element.
    """

    low: Tensor
    high: Tensor
    keys: int
    inside: Tensor
    outside: Tensor

    def whole(self) -> Tensor | None:
        """The value with its elements laid out; None if they are too many."""
        if self.low.numel() * self.keys > MOST:
            return None
        # NumPy compares numbers of 32 bits in a fifth of torch's time.
        low, high = (one.numpy().astype(np.int32) for one in (self.low, self.high))
        places = np.arange(self.keys, dtype=np.int32)
        within = torch.from_numpy((low <= places) & (places < high))
        return torch.where(within, self.inside, self.outside)


def joined(one: Band, other: Band) -> Band | None:
    """The band of two truth values together; None if either holds outside its own."""
    plain = all(
        band.inside.dtype == torch.bool and bool(band.inside) and not bool(band.outside)
        for band in (one, other)
    )
    if not plain or one.keys != other.keys:
        return None
    low = torch.maximum(one.low, other.low)
    return replace(one, low=low, high=torch.maximum(torch.minimum(one.high, other.high), low))


def compared(kind: str, left: Tensor, right: Tensor) -> Band | None:
    """The band of `left` compared with `right`: a row of ordered keys, and a column of queries."""
    of_keys = left.shape[-1:] != (1,)
    name = COMPARED[kind][0 if of_keys else 1]
    keys = left if of_keys else right
    queries = right if of_keys else left
    row = keys.reshape(-1)
    count = row.numel()
    if (
        keys.dtype != queries.dtype
        or keys.dtype not in (torch.int32, torch.int64)
        or count < 2
        or count != keys.shape[-1]
        or queries.dim() < 2
        or queries.shape[-2] < 2
        or queries.shape[-1] != 1
        or bool((row[1:] < row[:-1]).any())
    ):
        return None
    column = queries.contiguous()
    # The keys below the query's value, and those up to it.
    below = torch.searchsorted(row.contiguous(), column)
    up_to = torch.searchsorted(row.contiguous(), column, right=True)
    none = torch.zeros_like(below)
    all_of = torch.full_like(below, count)
    low, high = {
        "eq": (below, up_to),
        "le": (none, up_to),
        "lt": (none, below),
        "ge": (below, all_of),
        "gt": (up_to, all_of),
    }[name]
    holds = torch.tensor(True)
    return Band(low=low, high=high, keys=count, inside=holds, outside=~holds)


def triangle(value: Tensor, shape: tuple[int, ...], diagonal: int, *, upper: bool) -> Band | None:
    """`torch.triu` or `torch.tril` of [..., queries, keys] elements that are all equal."""
    if value.numel() > 1:
        return None
    keys = shape[-1]
    behind = torch.arange(shape[-2]).unsqueeze(1) + (diagonal if upper else diagonal + 1)
    behind = behind.clamp(0, keys)
    ends = (behind, torch.full_like(behind, keys)) if upper else (torch.zeros_like(behind), behind)
    inside = value.reshape(())
    return Band(
        low=ends[0], high=ends[1], keys=keys, inside=inside, outside=torch.zeros_like(inside)
    )
