"""Casts of weights to narrow copies: the numbers of a cast in one piece, however shards lie."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from autopar.ir import Role
from autopar.ir import Tensor as Described
from autopar.ir.recipes import RECIPES, narrow_copy
from autopar.runtime.local_forms.narrow_types import largest, narrowed
from autopar.runtime.local_forms.narrow_weights import NarrowWeight, WeightCast
from autopar.runtime.ranks.cuts import cuts_of, shard_of
from autopar.sharding.candidates import cuts_no_byte
from autopar.sharding.communication import scales_of
from autopar.sharding.layout import Layout, parse_layout

HELD = [name for name, recipe in RECIPES.items() if recipe.holds]
SHAPE = (256, 384)


def described(name: str, shape: tuple[int, ...] = SHAPE) -> Described:
    """A weight with its narrow copy."""
    plain = Described(name="w", shape=shape, dtype="float32", role=Role.PARAMETER, trainable=True)
    recipe = RECIPES[name]
    return Described(
        name="w",
        shape=shape,
        dtype="float32",
        role=Role.PARAMETER,
        trainable=True,
        narrow=narrow_copy(plain, recipe),
    )


def values(shape: tuple[int, ...] = SHAPE) -> Tensor:
    """A weight with rows of unequal sizes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.logspace(-2, 2, shape[-2])[:, None]


def in_one_piece(name: str, weight: Tensor) -> Tensor:
    """The numbers that a cast of the whole weight gives."""
    recipe = RECIPES[name]
    blocks = (recipe.block, recipe.block)
    return narrowed(weight, recipe, recipe.values, blocks, largest(weight)).wide()


def on_all_ranks(
    tensor: Described, weight: Tensor, ends: tuple[Layout, Layout], mesh: Sequence[int]
) -> dict[tuple[int, ...], Tensor]:
    """Each rank's part as it is stored, cast with maxima over the ranks that share blocks."""
    places = list(itertools.product(*map(range, mesh)))
    casts = {p: WeightCast.of(tensor, ends, mesh, p, torch.device("cpu")) for p in places}
    shards = {p: shard_of(weight, cuts_of(ends[0], mesh, p)) for p in places}
    kinds = scales_of(tensor, *ends, mesh)
    maxima_of = {p: [casts[p].largest(shards[p], k) for k in range(len(kinds))] for p in places}

    def beside(place: tuple[int, ...], axes: Sequence[int]) -> list[tuple[int, ...]]:
        return [
            p for p in places if all(p[a] == place[a] for a in range(len(mesh)) if a not in axes)
        ]

    made = {}
    for place in places:
        maxima = [
            torch.stack([maxima_of[p][k] for p in beside(place, scales.axes)]).amax(0)
            for k, scales in enumerate(kinds)
        ]
        scales = casts[place].scales_from(maxima, torch.float32)
        elements = casts[place].elements(shards[place], scales)
        stored = casts[place]
        part = NarrowWeight(
            elements,
            scales,
            stored.stored[0],
            stored.recipe.values,
            (tuple(shards[place].shape), torch.float32),
        )
        made[place] = part.wide(torch.float32)
    return made


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize(
    ("stored", "used", "mesh"),
    [
        ("R", "R", (1,)),
        ("S0", "B", (8,)),
        ("S1", "B", (8,)),
        ("S0 S1", "B B", (4, 4)),
        ("S0 S0", "S0 B", (2, 8)),
        ("S0 S0", "B S0", (8, 2)),
        ("S1 S0", "B S0", (8, 2)),
        ("S0", "S1", (3,)),
    ],
)
def test_shards_are_rounded_as_the_whole(
    name: str, stored: str, used: str, mesh: tuple[int, ...]
) -> None:
    """Also those that cut blocks, and those that change their place."""
    shape = (384, 384) if 3 in mesh else SHAPE
    tensor = described(name, shape)
    weight = values(shape)
    ends = parse_layout(stored), parse_layout(used)
    whole = in_one_piece(name, weight)
    for place, part in on_all_ranks(tensor, weight, ends, mesh).items():
        assert torch.equal(part, shard_of(whole, cuts_of(ends[0], mesh, place))), place


def test_axes_of_scales() -> None:
    """Nothing is sent where a rank has its blocks whole, in storage and in use."""

    def axes(name: str, stored: str, used: str, mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
        ends = parse_layout(stored), parse_layout(used)
        return [scales.axes for scales in scales_of(described(name), *ends, mesh)]

    assert axes("fp8-block", "S0", "S0", (2,)) == [()]
    assert axes("fp8-block", "S1 S0", "B S0", (4, 2)) == [(0,)]
    # The shards of the outer axis hold those of the inner one.
    assert axes("fp8-block", "S0 S0", "B S0", (4, 2)) == [(0, 1)]
    assert axes("fp8", "S1 S0", "B S0", (4, 2)) == [(0, 1)]
    assert axes("nvfp4", "S1 S0", "B S0", (4, 2)) == [(0,), (0, 1)]
    assert axes("fp8", "R", "B", (4,)) == [()]


def test_bytes() -> None:
    """An element has 8 or 4 bits; an expert has scales of its own."""
    plain = Described(name="w", shape=(4, 64, 32), dtype="bfloat16", role=Role.PARAMETER)
    copies = {name: narrow_copy(plain, RECIPES[name]) for name in HELD}
    assert {n: (c.bits, c.blocks, c.over) for n, c in copies.items()} == {
        "fp8": (8, (1, 64, 32), ()),
        "fp8-block": (8, (1, 128, 128), ()),
        "nvfp4": (4, (1, 16, 16), (1, 64, 32)),
    }
    assert described("nvfp4").bytes * 8 == described("fp8").own_bytes == 4 * 256 * 384


def test_no_shard_cuts_a_byte() -> None:
    """Two elements of 4 bits lie in one."""
    for name, fits in (("nvfp4", False), ("fp8", True)):
        tensor = described(name, (64, 48))
        assert cuts_no_byte(tensor, parse_layout("S1"), (8,))
        assert cuts_no_byte(tensor, parse_layout("S1"), (16,)) is fits
        assert cuts_no_byte(tensor, parse_layout("S0"), (64,))


def test_only_products_read_a_narrow_weight() -> None:
    cast = WeightCast.of(described("fp8"), ((), ()), (), (), torch.device("cpu"))
    shard = values()
    scales = cast.scales_from([cast.largest(shard, 0)], torch.float32)
    weight = cast.weight(cast.elements(shard, scales), scales, torch.bfloat16)
    assert weight.shape == SHAPE and weight.dtype is torch.bfloat16
    assert weight.detach().requires_grad_().requires_grad
    with pytest.raises(TypeError, match="narrow copy alone"):
        torch.relu(weight)
