"""The rule of a reshape: whatever split it allows, reshaping the shards gives the shards of the
reshaped tensor.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autopar.sharding.candidates import parts_of
from autopar.sharding.layout import Placement
from autopar.sharding.notation import Rule, bind, parse_rule
from autopar.sharding.rules.shape import reshape_rule

Array = NDArray[np.int64]
MAX_DEGREE = 6


def rule_between(before: tuple[int, ...], after: tuple[int, ...]) -> Rule:
    return bind(parse_rule(reshape_rule(before, after)), [before], [after])


def cut(whole: Array, placement: Placement | None, degree: int, rank: int) -> Array:
    """A shard; the whole where the tensor does not hold the factor."""
    if placement is None:
        return whole
    dim = placement.dim
    parts = placement.parts
    view = whole.reshape(
        *whole.shape[:dim],
        parts,
        degree,
        whole.shape[dim] // (parts * degree),
        *whole.shape[dim + 1 :],
    )
    piece: Array = view.take(rank, axis=dim + 1)
    return piece.reshape(*whole.shape[:dim], -1, *whole.shape[dim + 1 :])


def check(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """Try every factor, with every number of parts and every degree that divides it; how many
    splits there were.
    """
    rule = rule_between(before, after)
    whole = np.arange(math.prod(before)).reshape(before)
    sizes = [factor.size for factor in rule.factors]
    count = 0
    for index, factor in enumerate(rule.factors):
        if factor.whole:
            continue
        for parts in range(1, factor.size):
            for degree in range(2, MAX_DEGREE + 1):
                if factor.size % (parts * degree):
                    continue
                left, right = (
                    parts_of(dims, index, parts, sizes)
                    for dims in (rule.inputs[0], rule.outputs[0])
                )
                assert left is not None and right is not None, (
                    f"factor {factor.name} of {rule.text} lies on one side only"
                )
                for rank in range(degree):
                    moved = cut(whole, left, degree, rank)
                    expected = cut(whole.reshape(after), right, degree, rank)
                    assert np.array_equal(moved.reshape(expected.shape), expected), (
                        f"{rule.text}: {factor.name} {parts}x{degree}"
                    )
                count += 1
    return count


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of one product: the same primes dealt into dims in two ways, ones among them."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), max_size=6))

    def deal(order: list[int]) -> tuple[int, ...]:
        dims = [1] * draw(st.integers(1, 5))
        for prime in order:
            dims[draw(st.integers(0, len(dims) - 1))] *= prime
        return tuple(dims)

    return deal(primes), deal(draw(st.permutations(primes)))


@settings(max_examples=400, deadline=None)
@given(shapes=reshapes())
def test_every_allowed_split_commutes_with_the_reshape(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    check(*shapes)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ((2, 16, 12), (2, 16, 3, 4), "a b (c d) -> a b c d"),
        ((2, 3, 4), (6, 4), "a b c -> (a b) c"),
        ((6, 4), (4, 6), "!u0 !u1 -> !v0 !v1"),
        ((2, 6, 4), (2, 4, 6), "a !u1 !u2 -> a !v1 !v2"),
        ((4, 1, 6), (4, 6), "a 1 b -> a b"),
        ((8,), (2, 2, 2), "(a b c) -> a b c"),
        ((1,), (1, 1), "1 -> 1 1"),
        ((0, 4), (4, 0), "!w0 !w1 -> !v0 !v1"),
        ((), (1,), " -> 1"),
    ],
)
def test_texts(before: tuple[int, ...], after: tuple[int, ...], text: str) -> None:
    assert reshape_rule(before, after) == text
    rule_between(before, after)


@pytest.mark.parametrize(
    ("before", "after", "least"),
    [((4, 6), (4, 6), 3), ((12, 4), (3, 4, 4), 3), ((2, 3, 4), (6, 4), 3)],
)
def test_a_reshape_keeps_the_splits_that_it_can(
    before: tuple[int, ...], after: tuple[int, ...], least: int
) -> None:
    assert check(before, after) >= least
