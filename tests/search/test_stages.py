"""Stage cuts against looking at all of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.stages import balance, interval_sums, least_bottleneck, partition

TIMES = st.lists(st.integers(1, 9), min_size=1, max_size=9)


def every_cut(count: int, stages: int) -> list[tuple[int, ...]]:
    """All ways to cut `count` pieces into non-empty stages."""
    return [(0, *inner, count) for inner in itertools.combinations(range(1, count), stages - 1)]


@settings(max_examples=200, deadline=None)
@given(TIMES, st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_cut_has_a_faster_slowest_stage(times: list[int], stages: int, random: object) -> None:
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    tables = []
    for _ in range(stages):
        table = interval_sums(np.array(times, dtype=np.float64) * rng.integers(1, 4))
        table[rng.random(table.shape) < 0.15] = math.inf
        tables.append(table)

    def worst(cuts: tuple[int, ...]) -> float:
        return max(
            float(table[j, i - j])
            for table, (i, j) in zip(tables, itertools.pairwise(cuts), strict=True)
        )

    actual = partition(tables)
    best = min((worst(cuts) for cuts in every_cut(len(times), stages)), default=math.inf)
    assert (actual is None) == (best == math.inf)
    if actual is not None:
        assert worst(actual) == best


@settings(max_examples=100, deadline=None)
@given(TIMES, st.integers(1, 9), st.integers(1, 4))
def test_tables_of_short_intervals_hold_those_that_are_needed(
    times: list[int], longest: int, stages: int
) -> None:
    values = np.array(times, dtype=np.float64)
    width = min(longest, len(times))
    table = interval_sums(values, width)
    for stop in range(len(times) + 1):
        for column, start in enumerate(range(stop - width, stop)):
            assert table[stop, column] == (values[start:stop].sum() if start >= 0 else math.inf)
    whole = partition([interval_sums(values)] * stages)
    short = partition([table] * stages)
    if whole is not None and max(j - i for i, j in itertools.pairwise(whole)) <= width:
        assert short == whole


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=6, max_size=12), st.integers(2, 3))
def test_balancing_never_loads_the_fullest_device_more(times: list[int], devices: int) -> None:
    values = np.array(times, dtype=np.float64)
    costs = [interval_sums(values)] * (2 * devices)
    cuts = partition(costs)
    assert cuts is not None

    def loads(cut: tuple[int, ...]) -> list[float]:
        held = [float(values[i:j].sum()) for i, j in itertools.pairwise(cut)]
        return [sum(held[device::devices]) for device in range(devices)]

    actual = balance(cuts, costs, devices)
    assert (
        actual[0] == 0
        and actual[-1] == len(times)
        and all(i < j for i, j in itertools.pairwise(actual))
    )
    assert max(loads(actual)) <= max(loads(cuts))


def test_balancing_shares_out_the_second_chunks() -> None:
    # Both chunks of three pieces on device 0, both of two on device 1: the dearest stage cannot
    # tell.
    values = np.ones(10)
    assert balance((0, 3, 5, 8, 10), [interval_sums(values)] * 4, 2) in (
        (0, 2, 5, 8, 10),
        (0, 3, 5, 7, 10),
        (0, 3, 6, 8, 10),
    )


@settings(max_examples=200, deadline=None)
@given(TIMES, st.integers(1, 4))
def test_bisection_finds_the_bottleneck(times: list[int], stages: int) -> None:
    values = np.array(times, dtype=np.float64)
    cuts = itertools.chain.from_iterable(
        every_cut(len(times), count) for count in range(1, min(stages, len(times)) + 1)
    )
    best = min(max(float(values[i:j].sum()) for i, j in itertools.pairwise(cut)) for cut in cuts)
    assert best <= least_bottleneck(values, stages) <= best * (1 + 2e-4)
