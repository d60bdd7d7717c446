"""Sums that give a narrow copy of a parameter its scales (`autopar.ir.NarrowCopy`).

Shards of a stored parameter may cut a block. So every rank takes the largest elements of its part
of each block, and the maximum over the ranks that share a block is all-reduced before elements are
rounded and gathered. On an axis whose shards hold blocks whole, and where the parameter is used as
it is stored, nothing is sent. (Transformer Engine casts shards of weights so, too:
`cast_master_weights_to_fp8`, transformer_engine/pytorch/tensor/utils.py.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir import DTYPE_BYTES, Tensor

from ..layout import Kind, Layout, R
from ..mesh import Axes

NBYTES = DTYPE_BYTES["float32"]
"""Of a largest element on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The scales of one kind of a narrow copy on its way from storage to use.

    `blocks`: elements along each dim that share one. `layout`: of the blocks whose scales a rank
    has. `axes`: over which largest elements are all-reduced. `shape`: the number of blocks along
    each dim on a rank.
    """

    blocks: tuple[int, ...]
    layout: Layout
    axes: Axes
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the largest elements of a rank's blocks."""
        return NBYTES * math.prod(self.shape)


def scales_of(
    tensor: Tensor, stored: Layout, used: Layout, mesh: Sequence[int]
) -> tuple[Scales, ...]:
    """The scales of a parameter's narrow copy, by kind; none without such a copy."""
    levels = tensor.narrow.levels if tensor.narrow is not None else ()
    return tuple(_of_kind(tensor.shape, blocks, (stored, used), mesh) for blocks in levels)


def _of_kind(
    shape: Sequence[int], blocks: tuple[int, ...], ends: tuple[Layout, Layout], mesh: Sequence[int]
) -> Scales:
    staying = frozenset(_staying(shape, blocks, ends))
    layout = tuple(p if axis in staying else R for axis, p in enumerate(ends[0]))
    axes = tuple(
        axis
        for axis, placement in enumerate(ends[0])
        if placement.kind is Kind.SPLIT and axis not in staying and mesh[axis] > 1
    )
    counts = [-(-size // block) if block else 1 for size, block in zip(shape, blocks, strict=True)]
    for axis in staying:
        counts[layout[axis].dim] //= mesh[axis]
    return Scales(blocks=blocks, layout=layout, axes=axes, shape=tuple(counts))


def _staying(
    shape: Sequence[int], blocks: Sequence[int], ends: tuple[Layout, Layout]
) -> Iterator[int]:
    """The axes on which a rank's blocks are the same in storage and in use, and whole."""
    moved: set[int] = set()
    for axis, (before, after) in enumerate(zip(*ends, strict=True)):
        split = before.kind is Kind.SPLIT
        if split and before == after and before.dim not in moved:
            # A strategy splits a dim of several blocks between them (`rules/narrow_products.py`).
            if blocks[before.dim] < shape[before.dim]:
                yield axis
        elif before != after:
            # Shards of one dim nest in the order of the axes.
            moved.update(p.dim for p in (before, after) if p.kind is Kind.SPLIT)
