"""The front of (bytes, seconds): ever less memory at ever more cost, from the optimum to the least
memory; what is on the hull is found.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.search import CostGraph, exhaustive, solve
from autopar.search.memory.frontier import NEAR, STEP, frontier


def drawn(seed: int, count: int = 6) -> CostGraph:
    """A chain with a closing edge and random tables."""
    rng = np.random.default_rng(seed)
    sizes = tuple(int(size) for size in rng.integers(2, 4, count))
    pairs = [*itertools.pairwise(range(count)), (0, count - 1)]
    return CostGraph(
        sizes=sizes,
        unary=tuple(rng.random(size) for size in sizes),
        edges={(u, v): rng.random((sizes[u], sizes[v])) for u, v in pairs},
        memory=tuple(rng.integers(1, 50, size).astype(float) for size in sizes),
    )


@pytest.mark.parametrize("seed", range(20))
def test_it_falls_in_memory_and_rises_in_cost(seed: int) -> None:
    graph = drawn(seed)
    actual = list(frontier(graph))
    assert all(
        graph.cost(s.choices) == pytest.approx(s.cost) and graph.memory_of(s.choices) == s.memory
        for s in actual
    )
    assert all(
        one.memory > other.memory and one.cost <= other.cost
        for one, other in itertools.pairwise(actual)
    )
    assert actual[0].cost == pytest.approx(solve(graph).cost)
    assert all(one.lower_bound <= actual[0].cost * (1 + 1e-9) for one in actual)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_on_the_hull_is_found(seed: int) -> None:
    """At the price of every solution's line no assignment is cheaper than the front's best."""
    graph = drawn(seed)
    every = [
        (graph.cost(choices), graph.memory_of(choices))
        for choices in itertools.product(*(range(size) for size in graph.sizes))
    ]
    actual = list(frontier(graph, step=0.999))
    for price in (1e-3, 5e-3, 2e-2, 0.1):
        least = min(cost + price * memory for cost, memory in every)
        assert min(s.cost + price * s.memory for s in actual) <= least * (1 + 0.02)


def test_steps_are_small_where_solutions_are() -> None:
    graph = drawn(3, count=8)
    coarse, fine = (list(frontier(graph, step=step)) for step in (0.5, STEP))
    assert len(fine) > len(coarse) and fine[-1].memory == coarse[-1].memory
    limits = [
        0.5 * (one.memory + other.memory)
        for one, other in itertools.pairwise(fine)
        if other.memory < NEAR * one.memory
    ]
    for limit in limits:
        held = next(s for s in fine if s.memory <= limit)
        assert held.cost <= 1.5 * exhaustive(graph, memory_limit=limit).cost
