"""The recursion over axes: exact where the axes do not interact, close to the optimum where they do
a little; long chains of equal layers in no time.
"""

import itertools

import numpy as np
import pytest
from search_graphs import layered_graph

from autopar.search import CostGraph, recursive_programming, solve
from autopar.search.solvers.axis_by_axis import Prefixes


def on_axes(*, axes: int, count: int, seed: int, interaction: float) -> CostGraph:
    """A cycle of variables with three options on each axis: tables are sums over the axes, and a
    random part.
    """
    draw = np.random.default_rng(seed)
    digits = np.array(list(itertools.product(range(3), repeat=axes)))
    size = len(digits)
    edges = {}
    unary = []
    for v in range(count):
        parts = draw.random((axes, 3))
        unary.append(
            sum(parts[a][digits[:, a]] for a in range(axes)) + interaction * draw.random(size)
        )
        parts = draw.random((axes, 3, 3))
        table = sum(
            parts[a][digits[:, a][:, None], digits[:, a]] for a in range(axes)
        ) + interaction * draw.random((size, size))
        edges[min(v, (v + 1) % count), max(v, (v + 1) % count)] = table
    memory = tuple(1.0 + (digits == 0).sum(axis=1).astype(float) for _ in range(count))
    return CostGraph(
        sizes=(size,) * count,
        unary=tuple(unary),
        edges=edges,
        memory=memory,
        digits=(digits,) * count,
    )


@pytest.mark.parametrize("axes", [1, 2, 4])
def test_axes_that_do_not_interact_are_solved_exactly(axes: int) -> None:
    for seed in range(3):
        graph = on_axes(axes=axes, count=6, seed=seed, interaction=0.0)
        assert recursive_programming(graph).cost == pytest.approx(solve(graph).cost, rel=1e-12)


def test_a_little_interaction_costs_little() -> None:
    for seed in range(3):
        graph = on_axes(axes=3, count=6, seed=seed, interaction=0.3)
        exact = solve(graph)
        fast = recursive_programming(graph)
        assert fast.lower_bound <= exact.cost <= fast.cost <= 1.1 * exact.cost


def test_five_axes_within_a_memory_limit() -> None:
    graph = on_axes(axes=5, count=5, seed=0, interaction=0.1)
    free = recursive_programming(graph)
    limit = 0.8 * free.memory
    solution = recursive_programming(graph, memory_limit=limit)
    assert solution.memory <= limit and solution.cost >= free.lower_bound


def test_the_bound_is_kept() -> None:
    for seed in range(5):
        graph = layered_graph(layers=8, operators=5, size=6, seed=seed)
        exact = solve(graph)
        fast = recursive_programming(graph)
        assert fast.lower_bound <= exact.cost <= fast.cost


def test_one_choice_stands_for_each_prefix_alike_on_the_axes_behind() -> None:
    digits = np.array(list(itertools.product(range(3), repeat=4)))
    (standing,) = Prefixes([digits]).standing(2)
    assert len(standing) == 9
    assert all(c == d == b for a, b, c, d in digits[standing].tolist())


def test_prefixes_grow_from_the_choices_that_are_left() -> None:
    digits = np.array(list(itertools.product(range(3), repeat=3)))
    other = digits[digits[:, 2] != 1]
    prefixes = Prefixes([digits, other])
    for table, rows in enumerate((digits, other)):
        standing = prefixes.standing(3)[table]
        chosen = np.flatnonzero((rows[:, 0] == 1) & (rows[:, 1] == 2))[:1]
        longer = prefixes.longer(table, chosen, standing, 2)
        assert rows[longer].tolist() == [row for row in rows.tolist() if row[:2] == [1, 2]]


def test_equal_layers_choose_alike_and_cost_no_more_time() -> None:
    few = on_axes(axes=2, count=4, seed=1, interaction=0.2)
    joint = np.random.default_rng(1).random((9, 9))

    def repeated(layers: int) -> CostGraph:
        edges = {
            (u + 4 * layer, v + 4 * layer): table
            for layer in range(layers)
            for (u, v), table in few.edges.items()
        }
        edges |= {(4 * layer - 1, 4 * layer): joint for layer in range(1, layers)}
        assert few.digits is not None
        return CostGraph(
            sizes=few.sizes * layers,
            unary=few.unary * layers,
            edges=edges,
            digits=few.digits * layers,
        )

    some = repeated(50)
    assert recursive_programming(some).cost <= 1.02 * solve(some).cost
    many = recursive_programming(repeated(2000)).choices
    inner = {many[4 * layer : 4 * layer + 4] for layer in range(2, 1998)}
    assert len(inner) == 1
