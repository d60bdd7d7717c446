"""Weights of which a rank has a narrow copy (`autopar.ir.NarrowCopy`): their casts and reading.

    s = largest |x| of a block / most,   q = round(x / s),   x ~ s q

The largest elements are those of whole blocks, whose parts other ranks may hold, and the elements q
travel after them. The weight itself, in the type of the computation, is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Tensor as Described
from autopar.ir.recipes import RECIPES, Recipe
from autopar.runtime.ranks.cuts import cuts_of, shard_of
from autopar.sharding.communication import Scales, scales_of
from autopar.sharding.layout import Layout, local_shape

from .narrow_types import FLOAT4, coded, decoded, largest_of_type, scales_for, working_type

Places = tuple[Tensor, ...]
"""For each dim of a shard, the number of the block among a rank's blocks that an index is in."""


class NarrowWeight(Tensor):
    """A weight by its narrow elements and their scales, with the shape and dtype of the weight.

    Products by a recipe read it, and autograd gives it a gradient; nothing else is done with it.
    """

    elements: Tensor
    scales: Tensor
    places: Places
    kind: str

    @staticmethod
    def __new__(
        cls,
        elements: Tensor,
        scales: Tensor,
        places: Places,
        kind: str,
        like: tuple[tuple[int, ...], torch.dtype],
    ) -> NarrowWeight:
        shape, dtype = like
        # Autograd compares a gradient's shape and type with these; there is no memory behind them.
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=elements.device)
        made.elements = elements
        made.scales = scales
        made.places = places
        made.kind = kind
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # A segment takes its parameters as leaves of a graph of its own.
        if func is torch.ops.aten.detach.default:
            own = args[0]
            like = tuple(own.shape), own.dtype
            return NarrowWeight(own.elements, own.scales, own.places, own.kind, like)
        raise TypeError(f"{func} needs a weight of which there is a narrow copy alone")

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The numbers that the elements stand for."""
        numbers = decoded(self.elements, self.kind, self.shape[-1], dtype)
        return numbers * _spread(self.scales, self.places).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCast:
    """The cast of this rank's shard of a parameter to its part of the narrow copy.

    `stored`: for each kind of scale, the places of the shard; `used`: those of the copy as it is
    read, by the first kind. `shape`: of the copy on this rank.
    """

    recipe: Recipe
    scales: tuple[Scales, ...]
    stored: tuple[Places, ...]
    used: Places
    shape: tuple[int, ...]

    @classmethod
    def of(
        cls,
        tensor: Described,
        ends: tuple[Layout, Layout],
        mesh: Sequence[int],
        coordinate: Sequence[int],
        device: torch.device,
    ) -> WeightCast:
        """The cast on the way between two layouts, on a rank at a place of the mesh."""
        assert tensor.narrow is not None
        made = scales_of(tensor, *ends, mesh)

        def places(layout: Layout, scales: Scales) -> Places:
            return tuple(
                _places(tensor.shape, dim, layout, scales, mesh, coordinate).to(device)
                for dim in range(len(tensor.shape))
            )

        return cls(
            recipe=RECIPES[tensor.narrow.recipe],
            scales=made,
            stored=tuple(places(ends[0], scales) for scales in made),
            used=places(ends[1], made[0]),
            shape=local_shape(ends[1], tensor.shape, mesh),
        )

    @property
    def elements_shape(self) -> tuple[int, ...]:
        """The shape of the copy's elements in bytes."""
        *leading, columns = self.shape
        return (*leading, columns // 2 if self.recipe.values == FLOAT4 else columns)

    def largest(self, shard: Tensor, kind: int) -> Tensor:
        """The largest magnitudes of this rank's parts of its blocks, in single precision."""
        value = shard.detach().abs().float()
        # Dim by dim, as blocks are boxes. A block of which this rank has no part stays zero.
        for dim, places in enumerate(self.stored[kind]):
            shape = list(value.shape)
            shape[dim] = self.scales[kind].shape[dim]
            beside = places.view(-1, *[1] * (value.dim() - 1 - dim)).expand_as(value)
            value = value.new_zeros(shape).scatter_reduce_(dim, beside, value, "amax")
        return value

    def scales_from(self, largest: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The scales of this rank's blocks, from the largest magnitudes of whole ones."""
        most = largest_of_type(self.recipe.values)
        # A second kind reaches over the blocks of the first.
        whole = largest[1] if len(largest) > 1 else None
        return scales_for(largest[0].to(dtype) / most, self.recipe, most, whole)

    def elements(self, shard: Tensor, scales: Tensor) -> Tensor:
        """The elements of this rank's shard, as bytes."""
        wide = shard.detach().to(scales.dtype)
        # Types of fewer bits than 8, and those that no backend carries, travel as bytes.
        return coded(wide / _spread(scales, self.stored[0]), self.recipe.values).view(torch.uint8)

    def weight(self, elements: Tensor, scales: Tensor, dtype: torch.dtype) -> NarrowWeight:
        """The weight that consists of these elements."""
        like = self.shape, dtype
        return NarrowWeight(elements, scales, self.used, self.recipe.values, like)


def scale_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which scales of weights of a type are computed."""
    return working_type(torch.empty(0, dtype=dtype))


def _spread(scales: Tensor, places: Places) -> Tensor:
    """The scale of each element."""
    for dim, own in enumerate(places):
        scales = scales.index_select(dim, own)
    return scales


def _places(
    shape: Sequence[int],
    dim: int,
    layout: Layout,
    scales: Scales,
    mesh: Sequence[int],
    coordinate: Sequence[int],
) -> Tensor:
    """Where the block of each index of a shard is among a rank's blocks along a dim."""
    blocks = torch.arange(shape[dim]) // scales.blocks[dim]

    def own(of: Layout) -> Tensor:
        cuts = cuts_of(of, mesh, coordinate)
        return shard_of(blocks, [cut._replace(dim=0) for cut in cuts if cut.dim == dim])

    held = own(scales.layout).unique()  # type: ignore[no-untyped-call]
    return torch.searchsorted(held, own(layout).contiguous())
