"""Cuts: the slices that lead from a whole tensor to a rank's shard, and back again.

A split dim consists of `parts` equal parts, each of which is cut into `degree` shards. All of this
is arithmetic on one rank; the collectives are in `collectives.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from autopar.sharding.layout import Kind, Layout, Placement, R, local_parts


class Cut(NamedTuple):
    """One level of a split: `dim` is `parts` equal parts, each cut into `degree` shards.

    `coordinate`: the number of this rank's shard.
    """

    dim: int
    parts: int
    degree: int
    coordinate: int


def cuts_of(layout: Layout, mesh: Sequence[int], coordinate: Sequence[int]) -> tuple[Cut, ...]:
    """The slices that lead from the whole tensor to this rank's shard, to be taken in order."""
    # Outer axes have cut the tensor before: the number of parts that an axis still sees depends on
    # the axes so far.
    so_far: list[Placement] = [R] * len(layout)
    cuts: list[Cut] = []
    for axis, placement in enumerate(layout):
        so_far[axis] = placement
        if placement.kind is Kind.SPLIT and mesh[axis] > 1:
            parts = local_parts(tuple(so_far), axis, mesh)
            cuts.append(Cut(placement.dim, parts, mesh[axis], coordinate[axis]))
    return tuple(cuts)


def shard_of(value: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """This rank's shard of a whole tensor; a view where the layout of memory allows."""
    for cut in cuts:
        value = take(value, cut.dim, cut.parts, cut.degree, cut.coordinate)
    return value


def _levels(value: Tensor, dim: int, parts: int, degree: int) -> Tensor:
    """View `dim` as [parts, degree, chunk]."""
    shape = value.shape
    return value.reshape(
        *shape[:dim], parts, degree, shape[dim] // (parts * degree), *shape[dim + 1 :]
    )


def take(value: Tensor, dim: int, parts: int, degree: int, coordinate: int) -> Tensor:
    """The shard at `coordinate`: the chunk with this number of each part."""
    return _levels(value, dim, parts, degree).select(dim + 1, coordinate).flatten(dim, dim + 1)


def pad(value: Tensor, dim: int, parts: int, degree: int, coordinate: int) -> Tensor:
    """The whole tensor with the shard at `coordinate` in its place and zeros elsewhere."""
    shape = value.shape
    out = value.new_zeros(*shape[:dim], parts, degree, shape[dim] // parts, *shape[dim + 1 :])
    out.select(dim + 1, coordinate).copy_(_levels(value, dim, parts, 1).squeeze(dim + 1))
    return out.flatten(dim, dim + 2)


def join(pieces: Tensor, dim: int, parts: int) -> Tensor:
    """The whole tensor from [degree, *shard]: each part takes its chunk of every piece."""
    return _chunks(pieces, dim, parts).movedim(0, dim + 1).flatten(dim, dim + 2)


def write_joined(target: Tensor, pieces: Tensor, dim: int, parts: int) -> None:
    """Write the result of `join` into existing memory."""
    levels = _levels(target, dim, parts, pieces.shape[0])
    levels.movedim(dim + 1, 0).copy_(_chunks(pieces, dim, parts))


def _chunks(pieces: Tensor, dim: int, parts: int) -> Tensor:
    """View [degree, *shard] with the shard's `dim` as [parts, chunk]."""
    degree, *shard = pieces.shape
    return pieces.reshape(degree, *shard[:dim], parts, shard[dim] // parts, *shard[dim + 1 :])


def deal(value: Tensor, dim: int, parts: int, degree: int) -> Tensor:
    """The reverse of `join`: [degree, *shard], contiguous as collectives need it."""
    shards = _levels(value, dim, parts, degree).movedim(dim + 1, 0)
    return shards.flatten(dim + 1, dim + 2).contiguous()
