"""The prices of all redistributions at once are those of the cheapest chains, one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costmodel.redistribution.distances import Distances, distances
from autopar.costmodel.redistribution.layout_space import LayoutSpace
from autopar.costmodel.redistribution.step_prices import Charges, LinePrices
from autopar.sharding.layout import B, Kind, Layout, P, Placement, R, S, is_valid
from autopar.sharding.mesh import Axes, axis_sets
from autopar.sharding.redistribution import (
    STEP_PENALTY,
    chain_price,
    cheapest_chain,
    parameter_chain,
)

SHAPE = (24, 12)
ITEM = 4
BYTES = math.prod(SHAPE) * ITEM
MESHES = ((4,), (2, 3), (2, 2, 2))
SPLITS = (S(0), S(1), S(0, 3), S(1, 2), S(0, 2))
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MAX_KINDS = {1: 7, 2: 6, 3: 4}


@st.composite
def line_prices(draw: st.DrawFn) -> LinePrices:
    """One or two lines (the cheaper counts) for every collective and set of axes."""
    line = st.tuples(
        st.integers(0, 9).map(lambda v: v * 1e-6), st.integers(1, 9).map(lambda v: v * 1e-9)
    )
    table = {
        (n, a): tuple(draw(st.lists(line, min_size=1, max_size=2)))
        for n in NAMES
        for a in axis_sets((2, 2, 2))
    }
    return lambda name, axes: table[name, axes]


def scalar(lines: LinePrices, kind: str, axes: Axes, nbytes: int) -> float:
    return min(alpha + beta * nbytes for alpha, beta in lines(kind, axes))


@st.composite
def spaces(draw: st.DrawFn, *, gradient: bool, shares: bool = False) -> LayoutSpace:
    mesh = draw(st.sampled_from(MESHES))
    rest = st.lists(
        st.sampled_from((P, *SPLITS) if shares or not gradient else (B, P, *SPLITS)),
        unique=True,
        min_size=1,
        max_size=5,
    )
    kinds = ((R, B) if shares else (R,)) + tuple(draw(rest))
    return LayoutSpace(kinds=kinds[: MAX_KINDS[len(mesh)]], mesh=mesh)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), gradient=st.booleans(), lines=line_prices())
def test_distances_are_the_prices_of_the_cheapest_chains(
    data: st.DataObject, gradient: bool, lines: LinePrices
) -> None:
    space = data.draw(spaces(gradient=gradient))
    valid = np.nonzero(space.valid(SHAPE))[0]
    sources = np.array(data.draw(st.lists(st.sampled_from(valid.tolist()), min_size=1, max_size=3)))
    actual = distances(space, SHAPE, BYTES, lines, gradient=gradient, sources=sources)
    assert actual.shape == (len(sources), space.size)

    def price(kind: str, axes: Axes, nbytes: int) -> float:
        return scalar(lines, kind, axes, nbytes)

    for row, source in enumerate(sources):
        for target in data.draw(st.lists(st.sampled_from(valid.tolist()), min_size=1, max_size=8)):
            ends = space.layout(int(source)), space.layout(target)
            chain = cheapest_chain(
                *ends, SHAPE, ITEM, space.mesh, price, gradient=gradient, kinds=space.kinds
            )
            assert actual[row, target] == pytest.approx(
                chain_price(chain, BYTES, space.mesh, price, gradient=gradient), rel=1e-9, abs=1e-15
            )
    assert np.isinf(actual[:, ~space.valid(SHAPE)]).all()
    assert (actual[np.arange(len(sources)), sources] == 0).all()


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    lines=line_prices(),
    rate=st.integers(0, 20),
    often=st.tuples(st.integers(1, 8), st.integers(1, 8)),
)
def test_distances_from_storage_are_those_of_the_parameters_chains(
    data: st.DataObject, lines: LinePrices, rate: int, often: tuple[float, float]
) -> None:
    space = data.draw(spaces(gradient=True, shares=True))
    stored = [
        c
        for c in np.nonzero(space.valid(SHAPE))[0].tolist()
        if all(p == R or p.kind is Kind.SPLIT for p in space.layout(c))
    ]
    valid = np.nonzero(space.valid(SHAPE))[0].tolist()
    sources = np.array(data.draw(st.lists(st.sampled_from(stored), min_size=1, max_size=3)))

    def price(kind: str, axes: Axes, nbytes: int) -> float:
        return scalar(lines, kind, axes, nbytes)

    def share(kind: str, axes: Axes, nbytes: int) -> float:
        return rate * 1e-9 * nbytes

    def priced(chain: Sequence[Layout]) -> float:
        return chain_price(chain, BYTES, space.mesh, price, gradient=True, often=often)

    def find(start: Layout, end: Layout) -> tuple[tuple[Layout, ...], float]:
        chain = cheapest_chain(
            start,
            end,
            SHAPE,
            ITEM,
            space.mesh,
            price,
            gradient=True,
            kinds=space.kinds,
            often=often,
        )
        return chain, priced(chain)

    table = Distances(space, SHAPE, BYTES, Charges(lines=lines, often=often), gradient=True)
    actual = table.rows_from_storage(sources, lambda kind, axes: ((0.0, rate * 1e-9),), BYTES)
    for row, source in enumerate(sources.tolist()):
        for target in data.draw(st.lists(st.sampled_from(valid), min_size=1, max_size=6)):
            chain = parameter_chain(
                space.layout(source), space.layout(target), find, share, BYTES, space.mesh
            )
            shard = BYTES // int(space.divisors()[source])
            leads = [
                n for n in (0, 1) if n == 0 or (len(chain) > 1 and _is_share(chain[0], chain[1]))
            ]
            paid = [n * (share("all_reduce", (0,), shard) + STEP_PENALTY) for n in leads]
            rest = [priced(chain[n:]) for n in leads]
            candidates = [a + b for a, b in zip(paid, rest, strict=True)]
            assert actual[row, target] == pytest.approx(min(candidates), rel=1e-9, abs=1e-15)


def _is_share(before: Layout, after: Layout) -> bool:
    return {(b, a) for b, a in zip(before, after, strict=True) if b != a} == {(R, B)}


def test_rows_that_were_asked_for_before_stay_the_same() -> None:
    space = LayoutSpace(kinds=(R, B, P, S(0), S(1)), mesh=(2, 2))
    table = Distances(
        space,
        SHAPE,
        BYTES,
        Charges(lines=lambda kind, axes: ((1e-6, 1e-9 * sum(axis + 1 for axis in axes)),)),
        gradient=True,
    )
    first = table.rows(np.array([0, 6])).copy()
    everything = table.rows(np.arange(space.size))
    assert np.array_equal(everything[[0, 6]], first) and np.array_equal(
        table.rows(np.array([6, 0])), first[::-1]
    )


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from((R, B, P, *SPLITS)), unique=True, min_size=1, max_size=6).map(
        tuple
    ),
    mesh=st.sampled_from([(4,), (2, 3), (2, 2), (1, 2), (1, 1), ()]),
    shape=st.tuples(st.sampled_from([1, 2, 6, 12, 24]), st.sampled_from([1, 3, 4, 12])),
)
def test_a_space_numbers_its_layouts(
    kinds: tuple[Placement, ...], mesh: tuple[int, ...], shape: tuple[int, int]
) -> None:
    space = LayoutSpace(kinds=kinds, mesh=mesh)
    layouts = [space.layout(code) for code in range(space.size)]
    assert len(set(layouts)) == space.size == len(kinds) ** len(mesh)
    assert [space.code(layout) for layout in layouts] == list(range(space.size))
    assert space.codes(space.digits()).tolist() == list(range(space.size))
    assert space.valid(shape).tolist() == [is_valid(layout, shape, mesh) for layout in layouts]
    split = [
        math.prod(m for m, p in zip(mesh, layout, strict=True) if p.kind is Kind.SPLIT)
        for layout in layouts
    ]
    assert space.divisors().tolist() == split
