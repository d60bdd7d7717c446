"""Chains of redistributions: legal steps, the least price, slices first and gathers last."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.sharding import B, Kind, Layout, P, Placement, R, S
from autopar.sharding.layout import format_layout, is_valid, parse_layout
from autopar.sharding.mesh import Axes, axis_sets
from autopar.sharding.redistribution import (
    STEP_PENALTY,
    StepPrice,
    chain_price,
    change,
    cheapest_chain,
    leading_shares,
    parameter_chain,
    transfers,
    without_gradient,
)

SHAPE = (24, 24)
ITEM = 8
BYTES = math.prod(SHAPE) * ITEM
# The table of the design: (from, to) → (forward, backward), each a collective and what its bytes
# are in local bytes (p: the degree).
EDGES: dict[tuple[str, str], tuple[tuple[str, int] | None, tuple[str, int] | None]] = {
    ("R", "B"): (None, ("all_reduce", 1)),
    ("R", "S"): (None, ("all_gather", 1)),
    ("B", "R"): (None, None),
    ("B", "S"): (None, None),
    ("S", "R"): (("all_gather", 0), None),
    ("S", "B"): (("all_gather", 0), ("reduce_scatter", 0)),
    ("S", "S"): (("all_to_all", 1), ("all_to_all", 1)),
    ("P", "R"): (("all_reduce", 1), None),
    ("P", "S"): (("reduce_scatter", 1), ("all_gather", 1)),
    ("P", "B"): (("all_reduce", 1), ("all_reduce", 1)),
    ("R", "P"): (None, None),
    ("B", "P"): (None, None),
    ("S", "P"): (None, None),
}


def local(layout: Layout, mesh: Sequence[int]) -> int:
    return BYTES // math.prod(m for m, p in zip(mesh, layout, strict=True) if p.kind is Kind.SPLIT)


def legal(before: Layout, after: Layout) -> tuple[int, ...]:
    """The axes of a step that one collective (or none) can do, or none where it is no step."""
    changed = tuple(axis for axis, (b, a) in enumerate(zip(before, after, strict=True)) if b != a)
    if len({(before[axis], after[axis]) for axis in changed}) != 1:
        return ()
    source = before[changed[0]]
    target = after[changed[0]]
    if source.kind is target.kind is Kind.SPLIT and source.dim == target.dim:
        return ()
    nested = [
        p
        for axis, p in enumerate(before)
        if axis > changed[0] and axis not in changed and p.kind is Kind.SPLIT
    ]
    return () if source in nested or target in nested else changed


def priced(
    before: Layout,
    after: Layout,
    axes: tuple[int, ...],
    mesh: Sequence[int],
    price: StepPrice,
    gradient: bool,
) -> float:
    total = STEP_PENALTY
    degree = math.prod(mesh[axis] for axis in axes)
    for index, transfer in enumerate(EDGES[before[axes[0]].kind.value, after[axes[0]].kind.value]):
        if transfer is not None and (index == 0 or gradient):
            name, scale = transfer
            total += price(name, axes, (scale or degree) * local(before, mesh))
    return total


def shortest(
    source: Layout,
    target: Layout,
    kinds: Sequence[Placement],
    mesh: Sequence[int],
    price: StepPrice,
    gradient: bool,
) -> float:
    """Bellman and Ford over every layout; a value that is whole at the source is never summed."""
    layouts = [x for x in itertools.product(kinds, repeat=len(mesh)) if is_valid(x, SHAPE, mesh)]
    steps = []
    for before, after in itertools.permutations(layouts, 2):
        axes = legal(before, after)
        if axes and not any(before[axis] == P != source[axis] for axis in axes):
            steps.append((before, after, priced(before, after, axes, mesh, price, gradient)))
    best = dict.fromkeys(layouts, math.inf)
    best[source] = 0.0
    changed = True
    while changed:
        changed = False
        for before, after, cost in steps:
            if best[before] + cost < best[after]:
                best[after] = best[before] + cost
                changed = True
    return best[target]


@st.composite
def prices(draw: st.DrawFn) -> StepPrice:
    """A latency and a rate for every collective and set of axes."""
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    table = {
        (n, a): (draw(st.integers(0, 9)), draw(st.integers(1, 9)))
        for n in names
        for a in axis_sets((2, 2, 2))
    }
    return lambda name, axes, nbytes: (
        table[name, axes][0] * 1e-6 + table[name, axes][1] * 1e-10 * nbytes
    )


KINDS: tuple[Placement, ...] = (R, B, P, S(0), S(1), S(0, 3))


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    mesh=st.sampled_from([(2,), (4,), (2, 2), (2, 4)]),
    price=prices(),
    gradient=st.booleans(),
)
def test_the_cheapest_chain_is_the_shortest_path(
    data: st.DataObject, mesh: tuple[int, ...], price: StepPrice, gradient: bool
) -> None:
    kinds = tuple(k for k in KINDS if gradient or k != B)
    source, target = (tuple(data.draw(st.sampled_from(kinds)) for _ in mesh) for _ in range(2))
    assume(is_valid(source, SHAPE, mesh) and is_valid(target, SHAPE, mesh))
    chain = cheapest_chain(source, target, SHAPE, ITEM, mesh, price, gradient=gradient, kinds=kinds)
    assert chain[0] == source and chain[-1] == target and len(set(chain)) == len(chain)
    total = 0.0
    for before, after in itertools.pairwise(chain):
        axes = legal(before, after)
        assert axes and is_valid(after, SHAPE, mesh), (
            f"{format_layout(before)} to {format_layout(after)}"
        )
        total += priced(before, after, axes, mesh, price, gradient)
    assert total == pytest.approx(
        chain_price(chain, BYTES, mesh, price, gradient=gradient), rel=1e-12, abs=0
    )
    assert total == pytest.approx(
        shortest(source, target, kinds, mesh, price, gradient), rel=1e-12, abs=0
    )


@pytest.mark.parametrize("before", [R, B, P, S(0), S(1)], ids=str)
@pytest.mark.parametrize("after", [R, B, P, S(0), S(1)], ids=str)
def test_transfers_are_the_table(before: Placement, after: Placement) -> None:
    actual = tuple((t.collective, t.scale) if t else None for t in transfers(before, after, 4))
    if before == after:
        assert actual == (None, None)
        return
    wanted = EDGES[before.kind.value, after.kind.value]
    assert actual == tuple(
        (name, scale or 4) if entry else None
        for entry in wanted
        for name, scale in [entry or ("", 0)]
    )


def flat(name: str, axes: Axes, nbytes: int) -> float:
    """A latency and a rate, the same for all."""
    return 1e-6 + nbytes * 1e-9


def texts(
    source: str,
    target: str,
    mesh: tuple[int, ...],
    *,
    gradient: bool = False,
    kinds: tuple[Placement, ...] = (),
) -> list[str]:
    chain = cheapest_chain(
        parse_layout(source),
        parse_layout(target),
        SHAPE,
        ITEM,
        mesh,
        flat,
        gradient=gradient,
        kinds=kinds,
    )
    return [format_layout(layout) for layout in chain]


def test_slices_come_first_and_gathers_last() -> None:
    assert texts("R S0", "S1 R", (2, 2)) == ["R S0", "S1 S0", "S1 R"]
    assert texts("S0 R R", "R S1 S1", (2, 2, 2))[-2:] == ["S0 S1 S1", "R S1 S1"]
    assert texts("P R", "R S0", (2, 2)) == ["P R", "P S0", "R S0"]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), mesh=st.sampled_from([(2, 2), (2, 2, 2)]))
def test_no_slice_follows_a_gather_of_another_dim(
    data: st.DataObject, mesh: tuple[int, ...]
) -> None:
    """From splits of dim 0 to splits of dim 1 on other axes: everything is cut before anything is
    gathered.
    """
    sides = [data.draw(st.booleans()) for _ in mesh]
    source = tuple(S(0) if side else R for side in sides)
    target = tuple(R if side else S(1) for side in sides)
    chain = cheapest_chain(source, target, SHAPE, ITEM, mesh, flat, gradient=False)
    kinds = [change(before, after, mesh).after.kind for before, after in itertools.pairwise(chain)]
    assert kinds == sorted(kinds, key=lambda kind: kind is Kind.REPLICATED)


def test_nested_splits_are_undone_from_the_inside() -> None:
    assert texts("S0 S0", "R S0", (2, 2), kinds=(R, S(0))) == ["S0 S0", "R R", "R S0"]
    assert texts("S0 S0", "R S0", (2, 2)) == ["S0 S0", "R R", "R S0"]
    assert texts("R R", "S0 S0", (2, 2)) == ["R R", "S0 S0"]


def test_without_a_gradient_shares_are_replicas() -> None:
    assert without_gradient(parse_layout("B S0 P")) == parse_layout("R S0 P")
    assert texts("B S0", "R S0", (2, 2)) == ["R S0"]
    assert texts("R", "B", (2,)) == ["R"] and texts("R", "B", (2,), gradient=True) == ["R", "B"]


def test_a_whole_value_is_never_made_partial_only_to_be_summed() -> None:
    """Even where an all-reduce were free, R → S stays a slice with its all-gather."""

    def gathers_are_dear(name: str, axes: Axes, nbytes: int) -> float:
        return 1.0 if name == "all_gather" else 0.0

    actual = cheapest_chain((R,), (S(0),), SHAPE, ITEM, (2,), gathers_are_dear, gradient=True)
    assert all(P not in layout for layout in actual)


def test_a_parameters_leading_shares_cost_their_part_of_a_bucket() -> None:
    source = (R, R)
    target = (B, S(0))
    mesh = (2, 2)

    def find(start: Layout, end: Layout) -> tuple[tuple[Layout, ...], float]:
        chain = cheapest_chain(start, end, SHAPE, ITEM, mesh, flat, gradient=True)
        return chain, chain_price(chain, BYTES, mesh, flat, gradient=True)

    assert leading_shares((R, S(0), R), (2, 2, 2)) == [(0,), (2,), (0, 2)]
    # Free shares: both axes turn to B first, and the slice out of B needs no gather of the
    # gradient.
    free = parameter_chain(source, target, find, lambda name, axes, nbytes: 0.0, BYTES, mesh)
    assert [format_layout(x) for x in free] == ["R R", "B B", "B S0"]
    # Dear shares: the slice comes first, so that less is reduced.
    dear = parameter_chain(source, target, find, lambda name, axes, nbytes: 1.0, BYTES, mesh)
    assert dear[0] == source and dear[-1] == target and dear[1] != parse_layout("B R")
