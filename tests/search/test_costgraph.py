"""The cost graph refuses what it cannot mean, prices what it is given, and a solution states its
gap.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.search import SEARCHES, CostGraph, Infeasible, NoAssignment, Solution, solve

PAIR = CostGraph(
    sizes=(2, 3),
    unary=(np.array([0.0, 1.0]), np.array([2.0, 0.0, 5.0])),
    edges={(0, 1): np.array([[9.0, 9.0, 0.0], [0.0, 7.0, np.inf]])},
    memory=(np.array([1.0, 5.0]), np.array([1.0, 1.0, 4.0])),
)


def test_prices() -> None:
    assert PAIR.cost((1, 0)) == 3.0
    assert PAIR.cost((1, 2)) == np.inf
    assert PAIR.memory_of((1, 0)) == 6.0
    assert replace(PAIR, memory=None).memory_of((1, 0)) == 0.0
    with pytest.raises(ValueError, match="do not index"):
        PAIR.cost((0, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (2, 0)}, "needs a choice"),
        ({"unary": PAIR.unary[:1]}, "1 unary tables for 2"),
        ({"unary": (np.zeros(2), np.array([0.0, np.nan, 1.0]))}, "NaN"),
        (
            {"unary": (np.zeros(2), np.zeros(4))},
            r"unary of variable 1 must be a float64 array of shape \(3,\)",
        ),
        ({"unary": (np.zeros(2, dtype=np.float32), np.zeros(3))}, "float64"),
        ({"edges": {(1, 0): np.zeros((3, 2))}}, "ordered pair"),
        ({"edges": {(0, 1): np.zeros((3, 2))}}, "shape"),
        ({"edges": {(0, 1): np.full((2, 3), -np.inf)}}, "minus infinity"),
        ({"memory": (np.zeros(2), np.full(3, np.inf))}, "finite"),
        ({"memory": (np.zeros(2), -np.ones(3))}, "not negative"),
        ({"digits": (np.zeros((2, 1), dtype=int), np.zeros((3, 2), dtype=int))}, "same axes"),
        ({"digits": (np.zeros((2, 1)), np.zeros((3, 1)))}, "integers"),
        ({"names": ("a",)}, "1 names"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PAIR, **change)


@pytest.mark.parametrize("method", SEARCHES)
def test_methods_agree_on_a_pair(method: str) -> None:
    assert solve(PAIR, method=method).cost == 3.0
    limited = solve(PAIR, method=method, memory_limit=5.0)
    assert (limited.choices, limited.cost, limited.memory) == ((0, 2), 5.0, 5.0)
    with pytest.raises(Infeasible, match="fits 1 bytes") as caught:
        solve(PAIR, method=method, memory_limit=1.0)
    assert (caught.value.minimum_memory, caught.value.limit) == (2.0, 1.0)


@pytest.mark.parametrize("method", SEARCHES)
def test_degenerate_graphs(method: str) -> None:
    empty = CostGraph(sizes=(), unary=(), edges={}, memory=())
    assert solve(empty, method=method).choices == ()
    assert solve(empty, method=method, memory_limit=0.0).cost == 0.0
    with pytest.raises(NoAssignment):
        solve(replace(PAIR, edges={(0, 1): np.full((2, 3), np.inf)}), method=method)
    with pytest.raises(NoAssignment):
        solve(
            replace(PAIR, edges={(0, 1): np.full((2, 3), np.inf)}), method=method, memory_limit=1.0
        )
    with pytest.raises(ValueError, match="memory tables"):
        solve(replace(PAIR, memory=None), method=method, memory_limit=1.0)


def test_unknown_method_lists_the_names() -> None:
    with pytest.raises(
        ValueError, match="dynamic_programming, lagrangian, recursive_programming, exhaustive"
    ):
        solve(PAIR, method="greedy")


def test_too_many_to_enumerate() -> None:
    with pytest.raises(ValueError, match="too many"):
        solve(CostGraph(sizes=(2,) * 40, unary=(np.zeros(2),) * 40, edges={}), method="exhaustive")


def test_gap() -> None:
    half = Solution(choices=(0,), cost=2.0, memory=0.0, lower_bound=1.0, method="x")
    assert half.gap == 0.5
    assert replace(half, lower_bound=2.0).gap == 0.0
    assert replace(half, cost=0.0, lower_bound=0.0).gap == 0.0
    with pytest.raises(ValueError, match="above the cost"):
        replace(half, lower_bound=3.0)
