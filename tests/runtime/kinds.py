"""The four kinds by their definition, in one process: what every rank holds of a value or of a
gradient.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from autopar.sharding.layout import Kind, Layout, Placement


def pieces(
    whole: Tensor, layout: Layout, mesh: tuple[int, ...], *, gradient: bool, seed: int
) -> list[Tensor]:
    """The part of `whole` that each rank holds; partial kinds are random addends, equal on
    replicas. Splits nest by parts, then by axis.
    """
    generator = torch.Generator().manual_seed(seed)
    held: dict[tuple[int, ...], Tensor] = {(): whole}
    coordinates = list(itertools.product(*map(range, mesh)))
    out = dict.fromkeys(coordinates, whole)
    addends = _addend_axes(layout, gradient)
    for axes in addends:
        others = [axis for axis in addends if axis != axes]
        held = {}
        for coordinate in coordinates:
            rest = tuple(coordinate[axis] for axis in others)
            if rest not in held:
                value = out[coordinate]
                parts = [
                    torch.rand(value.shape, dtype=value.dtype, generator=generator)
                    for _ in range(mesh[axes] - 1)
                ]
                held[rest] = torch.stack([*parts, value - sum(parts)])
        out = {
            coordinate: held[tuple(coordinate[axis] for axis in others)][coordinate[axes]]
            for coordinate in coordinates
        }
    return [_slice(out[coordinate], layout, mesh, coordinate) for coordinate in coordinates]


def _addend_axes(layout: Layout, gradient: bool) -> list[int]:
    kind = Kind.BROADCAST if gradient else Kind.PARTIAL
    return [axis for axis, placement in enumerate(layout) if placement.kind is kind]


def _slice(
    value: Tensor, layout: Layout, mesh: tuple[int, ...], coordinate: tuple[int, ...]
) -> Tensor:
    """Global indices of the shard on every dim, by the definition of the levels."""
    for dim in range(value.dim()):
        index = torch.arange(value.shape[dim])
        splits = [
            (placement.parts, axis)
            for axis, placement in enumerate(layout)
            if placement.kind is Kind.SPLIT and placement.dim == dim
        ]
        for parts, group in itertools.groupby(sorted(splits), key=lambda pair: pair[0]):
            axes = [axis for _, axis in group]
            degree = 1
            position = 0
            for axis in axes:
                degree *= mesh[axis]
                position = position * mesh[axis] + coordinate[axis]
            span = value.shape[dim] // parts
            inside = (
                torch.div(index % span, span // degree, rounding_mode="floor")
                if span % degree == 0
                else None
            )
            assert inside is not None
            index = index[inside == position]
        value = value.index_select(dim, index)
    return value


def assemble(
    held: list[Tensor],
    layout: Layout,
    mesh: tuple[int, ...],
    shape: tuple[int, ...],
    *,
    gradient: bool,
) -> Tensor:
    """The whole value that the ranks hold; fails where replicas differ."""
    total = torch.zeros(shape, dtype=held[0].dtype)
    coordinates = list(itertools.product(*map(range, mesh)))
    index = torch.arange(total.numel()).reshape(shape)
    addends = _addend_axes(layout, gradient)
    replicas = [
        axis for axis, p in enumerate(layout) if p.kind is not Kind.SPLIT and axis not in addends
    ]
    first: dict[tuple[int, ...], Tensor] = {}
    for coordinate, value in zip(coordinates, held, strict=True):
        key = tuple(c for axis, c in enumerate(coordinate) if axis not in replicas)
        if key in first:
            torch.testing.assert_close(value, first[key], msg=f"replicas of {layout} differ")
            continue
        first[key] = value
        total.view(-1).index_add_(
            0, _slice(index, layout, mesh, coordinate).reshape(-1), value.reshape(-1)
        )
    return total


def all_kinds(dims: dict[int, tuple[int, ...]]) -> list[Placement]:
    """Every kind, with the given splits."""
    return [
        Placement(Kind.REPLICATED),
        Placement(Kind.BROADCAST),
        Placement(Kind.PARTIAL),
        *(Placement(Kind.SPLIT, dim, q) for dim, parts in dims.items() for q in parts),
    ]
