"""The parts of a tensor on the ranks of a mesh, and the whole put together from them."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from autopar.sharding.layout import Kind, Layout, format_layout

_UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def shard(
    whole: Tensor, layout: Layout, mesh: tuple[int, ...], coordinate: tuple[int, ...]
) -> Tensor:
    """The shard at a coordinate of the mesh: splits nest by parts, then by axis."""
    # Torch has few functions of these types: their bits are cut as integers.
    bits = _UNSIGNED.get(whole.dtype)
    if whole.dtype.is_floating_point and whole.dtype.itemsize == 1:
        bits = torch.int8
    if bits is not None:
        return shard(whole.view(bits), layout, mesh, coordinate).view(whole.dtype)
    for dim in range(whole.dim()):
        splits = [
            (p.parts, axis)
            for axis, p in enumerate(layout)
            if p.kind is Kind.SPLIT and p.dim == dim and mesh[axis] > 1
        ]
        if not splits:
            continue
        index = torch.arange(whole.shape[dim])
        # Axes that split a dim within the same parts nest in the mesh's order.
        for parts, group in itertools.groupby(sorted(splits), key=lambda pair: pair[0]):
            degree = 1
            position = 0
            for _, axis in group:
                degree *= mesh[axis]
                position = position * mesh[axis] + coordinate[axis]
            span = whole.shape[dim] // parts
            assert span % degree == 0, f"{layout} does not divide {list(whole.shape)}"
            index = index[index % span // (span // degree) == position]
        whole = whole.index_select(dim, index)
    return whole


def hold(
    whole: Tensor, layout: Layout, mesh: tuple[int, ...], *, gradient: bool, seed: int
) -> list[Tensor]:
    """Each rank's part of a value.

    The addends of a partial sum are random, and depend on the partial axes alone.
    """
    axes = partial_axes(layout, gradient)
    generator = torch.Generator().manual_seed(seed)
    addends = [
        torch.rand(whole.shape, dtype=whole.dtype, generator=generator)
        for _ in range(math.prod(mesh[a] for a in axes) - 1)
    ]
    # The last addend makes the sum right.
    addends.append(whole - sum(addends) if addends else whole)
    held = []
    for coordinate in itertools.product(*map(range, mesh)):
        position = 0
        for axis in axes:
            position = position * mesh[axis] + coordinate[axis]
        held.append(shard(addends[position], layout, mesh, coordinate))
    return held


def assemble(
    held: list[Tensor],
    layout: Layout,
    mesh: tuple[int, ...],
    shape: tuple[int, ...],
    *,
    gradient: bool,
) -> Tensor:
    """The whole value that the ranks hold; fails where replicas differ."""
    partial = partial_axes(layout, gradient)
    replicas = [
        axis for axis, p in enumerate(layout) if p.kind is not Kind.SPLIT and axis not in partial
    ]
    total = torch.zeros(shape, dtype=held[0].dtype)
    # A shard of the indices says where a shard of the values belongs.
    index = torch.arange(total.numel()).reshape(shape)
    first: dict[tuple[int, ...], Tensor] = {}
    for coordinate, value in zip(itertools.product(*map(range, mesh)), held, strict=True):
        key = tuple(c for axis, c in enumerate(coordinate) if axis not in replicas)
        if key in first:
            problem = f"replicas of [{format_layout(layout)}] differ"
            torch.testing.assert_close(
                value, first[key], rtol=1e-9, atol=1e-9, equal_nan=True, msg=problem
            )
            continue
        first[key] = value
        places = shard(index, layout, mesh, coordinate).reshape(-1)
        total.view(-1).index_add_(0, places, value.reshape(-1))
    return total


def partial_axes(layout: Layout, gradient: bool) -> list[int]:
    """The axes on which ranks hold addends: B has them as gradients, P as values."""
    kind = Kind.BROADCAST if gradient else Kind.PARTIAL
    return [axis for axis, placement in enumerate(layout) if placement.kind is kind]
