"""Bands against the values that they stand for, laid out."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from autopar.frontends.torch.masks.bands import COMPARED, MOST, Band, compared, joined, triangle
from autopar.frontends.torch.masks.patterns import Plain, pattern_of

KEYS = 5
PLACES = 8
SEEDS = range(4)


def operator(kind: str) -> torch._ops.OpOverload:
    _, name, overload = kind.split(".")
    return getattr(getattr(torch.ops.aten, name), overload)  # type: ignore[no-any-return]


def laid_out(band: Band | None) -> Tensor:
    assert band is not None
    whole = band.whole()
    assert whole is not None
    return whole


def row(seed: int) -> Tensor:
    """Keys in order, some of them equal."""
    numbers = torch.randint(-3, 4, (1, KEYS), generator=torch.Generator().manual_seed(seed))
    return numbers.sort().values


def column(seed: int) -> Tensor:
    """Queries of two batches, in any order."""
    return torch.randint(-4, 5, (2, 7, 1), generator=torch.Generator().manual_seed(seed + 100))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", COMPARED)
def test_a_comparison(kind: str, seed: int, turned: bool) -> None:
    pair = (column(seed), row(seed)) if turned else (row(seed), column(seed))
    assert torch.equal(laid_out(compared(kind, *pair)), operator(kind)(*pair))


@pytest.mark.parametrize("seed", SEEDS)
def test_two_bands_together(seed: int) -> None:
    bands = [
        compared(kind, row(number), column(number))
        for number, kind in enumerate(COMPARED, start=seed)
    ]
    for one, other in itertools.combinations(bands, 2):
        assert one is not None and other is not None
        assert torch.equal(laid_out(joined(one, other)), laid_out(one) & laid_out(other))


def test_values_without_an_order_are_no_band() -> None:
    kind = "aten.le.Tensor"
    assert compared(kind, torch.tensor([[2, 1, 3]]), column(0)) is None
    assert compared(kind, row(0).double(), column(0).double()) is None
    assert compared(kind, row(0).expand(2, KEYS), column(0)) is None


@pytest.mark.parametrize("diagonal", range(-8, 9))
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 5, 5)], ids=str)
def test_triangles(shape: tuple[int, ...], diagonal: int) -> None:
    whole = torch.full(shape, -2.5)
    one = torch.full((1,) * len(shape), -2.5)
    for function, upper in ((torch.triu, True), (torch.tril, False)):
        band = triangle(one, shape, diagonal, upper=upper)
        assert torch.equal(laid_out(band).expand(shape), function(whole, diagonal))
    assert triangle(whole, shape, diagonal, upper=True) is None


def test_what_is_too_large_is_not_laid_out() -> None:
    places = torch.arange(MOST // 64 + 1)
    band = compared("aten.le.Tensor", places.unsqueeze(0), places[:64].unsqueeze(1))
    assert band is not None and band.whole() is None


def mask_of(low: Tensor, high: Tensor) -> Band:
    holds = torch.tensor(True)
    return Band(low=low, high=high, keys=PLACES, inside=holds, outside=~holds)


@pytest.mark.parametrize("before", [0, 2, PLACES])
@pytest.mark.parametrize("after", [0, 1, PLACES])
def test_a_mask_has_the_pattern_of_its_band(before: int, after: int) -> None:
    places = torch.arange(PLACES).unsqueeze(1)
    low = (places - before).clamp(min=0)
    band = mask_of(low, (places + after + 1).clamp(max=PLACES))
    pattern = pattern_of(band, PLACES, PLACES)
    assert pattern is not None
    assert pattern_of(band.whole(), PLACES, PLACES) == pattern


def test_a_mask_of_two_pieces_has_no_pattern() -> None:
    mask = torch.ones(PLACES, PLACES, dtype=torch.bool)
    assert pattern_of(mask, PLACES, PLACES) is Plain.WHOLE
    # Both sides of a hole are seen, in the middle and at either end of a row.
    for key in (1, PLACES // 2, PLACES - 2):
        holed = mask.clone()
        holed[3, key] = False
        assert pattern_of(holed, PLACES, PLACES) is None
