"""Random numbers by counter: the same for every part of a tensor, and good enough in every
direction in which they could be alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from autopar.runtime.local_forms.random_tensors import drawn
from autopar.runtime.random_numbers.counter_bits import Key, Region, bits, places
from autopar.runtime.random_numbers.distributions import Source
from autopar.runtime.random_numbers.draw_state import Draws, current, drawing, operator_number
from autopar.runtime.ranks.cuts import Cut, shard_of

KEY = Key.of(Draws(seed=3, step=5), operator_number("dropout"))
CPU = torch.device("cpu")
SHAPES = {
    "matrix": (12, 24),
    "vector": (144,),
    "batch first": (24, 3, 5),
    "narrow": (1440, 3),
    "scores": (4, 6, 12, 20),
    "scalar": (),
    "empty": (4, 0),
}


def _all_cuts(shape: tuple[int, ...]) -> list[list[tuple[Cut, ...]]]:
    """Ways to cut a tensor: of each, the cuts of all ranks."""
    cuts: list[list[tuple[Cut, ...]]] = [[()]]
    for dim, size in enumerate(shape):
        one = [
            (parts, degree)
            for parts in (1, 2, 3)
            for degree in (2, 3, 4)
            if size and size % (parts * degree) == 0
        ]
        cuts += [[(Cut(dim, parts, degree, at),) for at in range(degree)] for parts, degree in one]
        if size and size % 12 == 0:  # micro-batches of shards, and shards of interleaved shards
            for first, second in itertools.product(((1, 3), (2, 3)), ((1, 2), (2, 2))):
                pairs = itertools.product(range(first[1]), range(second[1]))
                if size // first[1] % (second[0] * second[1]) == 0:
                    cuts.append([(Cut(dim, *first, i), Cut(dim, *second, j)) for i, j in pairs])
    if len(shape) > 1 and shape[0] % 2 == 0 and shape[1] and shape[1] % 3 == 0:
        cuts.append([(Cut(1, 1, 3, i), Cut(0, 1, 2, j)) for i in range(3) for j in range(2)])
    return cuts


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_part_is_the_slice_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = bits(KEY, Region.of(shape, ()))
    flat = torch.arange(math.prod(shape)).reshape(shape)
    assert whole.shape == shape and len(whole.unique()) >= whole.numel() - 1
    for ranks in _all_cuts(shape):
        seen = []
        for cuts in ranks:
            region = Region.of(shape, cuts)
            actual = bits(KEY, region)
            assert actual.shape == region.shape
            assert torch.equal(actual, shard_of(whole, cuts))
            seen.append(shard_of(flat, cuts).flatten())
        assert torch.cat(seen).sort().values.equal(flat.flatten())


def test_a_part_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of dims, as blocks of attention are, whatever is mixed at once."""
    cuts = (Cut(0, 1, 2, 1), Cut(2, 2, 3, 1))
    whole = shard_of(bits(KEY, Region.of((4, 5, 12, 20), ())), cuts)
    for most in (7, 60, 2**16):
        monkeypatch.setattr("autopar.runtime.random_numbers.counter_bits.AT_ONCE", most)
        region = Region.of((4, 5, 12, 20), cuts).narrow(0, 1, 2).narrow(-2, 1, 4).narrow(-1, 0, 13)
        assert torch.equal(bits(KEY, region), whole[1:2, :, 1:4, :13])


def test_places_of_a_long_dim() -> None:
    """Counters have 64 bits."""
    size = 3 * 2**40
    cuts = (Cut(0, 1, 3, 2), Cut(0, 1, 2**38, 2**38 - 1))
    assert places(size, cuts, torch.arange(4)).tolist() == [size - 4, size - 3, size - 2, size - 1]
    held = [bits(KEY, Region.of((size,), (Cut(0, 1, 3 * 2**38, at),))) for at in (0, 2**30, 2**37)]
    assert len(torch.cat(held).unique()) == 12, (
        "places that differ by multiples of 2^32 are drawn apart"
    )
    tall = [
        bits(KEY, Region.of((size, 64), (Cut(0, 1, 3 * 2**38, at),))) for at in (0, 2**30, 2**37)
    ]
    assert len(torch.cat(tall).unique()) == 12 * 64


def _signs(x: Tensor) -> Tensor:
    """[elements, 32]: every bit as a sign."""
    return torch.stack([(x.flatten() >> bit & 1).float() * 2 - 1 for bit in range(32)], 1)


def _correlation(x: Tensor, y: Tensor) -> float:
    """The greatest correlation of any bit of one with any bit of the other, in deviations."""
    return float((_signs(x).T @ _signs(y)).abs().max()) / math.sqrt(x.numel())


def _drawn(**changes: int) -> Tensor:
    draws = Draws(seed=changes.get("seed", 0), step=changes.get("step", 0))
    return bits(
        Key.of(draws, changes.get("operator", 1), changes.get("stream", 0)),
        Region.of((512, 512), ()),
    )


X = _drawn()
NEIGHBOURS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "columns": lambda: (X[:, :-1], X[:, 1:]),
    "rows": lambda: (X[:-1], X[1:]),
    "columns apart": lambda: (X[:, :-64], X[:, 64:]),
    "rows apart": lambda: (X[:-256], X[256:]),
    "a diagonal": lambda: (X[:-1, :-1], X[1:, 1:]),
    "rectangles": lambda: (X[:-1, :-1] ^ X[1:, :-1], X[:-1, 1:] ^ X[1:, 1:]),
    "wide rectangles": lambda: (X[:256, :256] ^ X[256:, :256], X[:256, 256:] ^ X[256:, 256:]),
    **{
        f"the next {name}": lambda name=name: (X, _drawn(**{name: 2}))
        for name in ("seed", "step", "operator", "stream")
    },  # type: ignore[misc]
    "rows of two steps": lambda: (X[:-1] ^ X[1:], (y := _drawn(step=1))[:-1] ^ y[1:]),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_no_bit_tells_of_another(name: str) -> None:
    """Among 1,024 pairs of bits the greatest correlation stays below what chance gives once in
    2,000 such tests.
    """
    assert _correlation(*NEIGHBOURS[name]()) < 5.0


def test_a_weak_hash_would_be_noticed() -> None:
    rows = torch.arange(512, dtype=torch.int32)[:, None]
    columns = torch.arange(512, dtype=torch.int32)
    weak = (rows * 40503 + columns * 48271).mul(-1640531535)
    assert _correlation(weak[:, :-1], weak[:, 1:]) > 100


@pytest.mark.parametrize("shape", [(1024, 1024), (2**20,), (2**18, 4), (16, 2**16)], ids=str)
def test_bits_are_even(shape: tuple[int, ...]) -> None:
    x = bits(KEY, Region.of(shape, ())).to(torch.int64) & 0xFFFFFFFF
    for byte in range(4):
        counts = torch.bincount((x >> 8 * byte & 255).flatten(), minlength=256)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    expected = x.numel() ** 2 / 2**33
    assert abs(x.numel() - len(x.unique()) - expected) < 5 * math.sqrt(expected), (
        "as many equal numbers as chance gives"
    )


UNIT = Source(Draws(seed=1), 7, Region.of((1024, 512), ()))
DISTRIBUTIONS = {
    "uniform": (lambda: UNIT.uniform(), stats.uniform()),
    "uniform in double": (lambda: UNIT.uniform(torch.float64), stats.uniform()),
    "exponential": (lambda: UNIT.exponential(), stats.expon()),
    "normal": (lambda: UNIT.normal(), stats.norm()),
    "normal in double": (lambda: UNIT.normal(torch.float64), stats.norm()),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name: str) -> None:
    draw, wanted = DISTRIBUTIONS[name]
    values = draw().double().flatten()
    assert stats.kstest(values.numpy(), wanted.cdf).pvalue > 1e-3
    assert abs(float(values.mean()) - wanted.mean()) < 5 * wanted.std() / math.sqrt(len(values))
    after = values[1:] - wanted.mean(), values[:-1] - wanted.mean()
    assert abs(float((after[0] * after[1]).mean())) < 5 * wanted.var() / math.sqrt(len(values))


@pytest.mark.parametrize("rate", [0.0, 0.001, 0.1, 0.5, 0.9, 1.0])
def test_the_share_chosen(rate: float) -> None:
    chosen = UNIT.chosen(rate)
    assert abs(float(chosen.double().mean()) - rate) <= 5 * math.sqrt(
        rate * (1 - rate) / chosen.numel()
    )
    assert torch.equal(chosen, UNIT.uniform(torch.float64) < rate), (
        "the same numbers, cut at the rate"
    )


def test_types_and_bounds() -> None:
    for dtype, digits in ((torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)):
        values = UNIT.uniform(dtype)
        assert values.dtype == dtype and float(values.min()) >= 0 and float(values.max()) < 1
        assert torch.equal(
            (values.double() * 2**digits).frac(), torch.zeros(values.shape, dtype=torch.float64)
        )
        assert UNIT.normal(dtype).dtype == dtype and bool(UNIT.normal(dtype).isfinite().all())
    values = UNIT.integers(-3, 9)
    assert values.unique().tolist() == list(range(-3, 9))
    assert stats.chisquare(torch.bincount(values.flatten() + 3).numpy()).pvalue > 1e-4
    wide = UNIT.integers(0, 2**63)
    assert int(wide.min()) >= 0 and int(wide.max()) > 2**62


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.uint8, torch.float16, torch.bfloat16]
)
def test_numbers_without_bounds_are_those_of_torch(dtype: torch.dtype) -> None:
    """From zero to the largest integer up to which the type holds all."""
    given = torch.empty(2**17, dtype=dtype)
    with drawing(Draws(seed=1)):
        actual = drawn("aten.random.default", given.shape, (), 7, self=given)
    assert actual.dtype == dtype and torch.equal(
        actual.double().unique(), given.random_().double().unique()
    )


def test_draws_are_of_the_thread_and_nest() -> None:
    assert current().exact
    with drawing(Draws(seed=1)), drawing(Draws(seed=2, step=4)):
        assert current() == Draws(seed=2, step=4, exact=False)
    with pytest.raises(KeyError), drawing(Draws(seed=1)):
        raise KeyError
    assert current().exact
