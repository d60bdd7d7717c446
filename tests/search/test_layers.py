"""Graphs of equal layers: the optimum is that of an integer program, and the work grows with the logarithm of the layers."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array
from search_graphs import layered_graph

from autopar.search import CostGraph, Infeasible, solve
from autopar.search.elimination import schedule
from autopar.search.pruning import reduce


def integer_optimum(graph: CostGraph, limit: float | None = None) -> float:
    """The optimum by HiGHS: a binary for each choice, a weight for each pair of choices on an edge, marginals that agree."""
    starts = np.concatenate([[0], np.cumsum(graph.sizes)]).astype(int)
    costs = list(np.concatenate(graph.unary))
    rows: list[tuple[list[int], list[float], float, float]] = []
    for start, size in zip(starts, graph.sizes, strict=False):
        rows.append((list(range(start, start + size)), [1.0] * size, 1.0, 1.0))
    for (u, v), table in graph.edges.items():
        numbers = len(costs) + np.arange(table.size).reshape(table.shape)
        costs.extend(table.reshape(-1))
        for end, lines in ((u, numbers), (v, numbers.T)):
            for choice, line in enumerate(lines):
                rows.append(([int(starts[end] + choice), *map(int, line)], [-1.0] + [1.0] * len(line), 0.0, 0.0))
    if limit is not None and graph.memory is not None:
        rows.append((list(range(starts[-1])), list(np.concatenate(graph.memory)), -np.inf, limit))
    matrix = lil_array((len(rows), len(costs)))
    for i, (columns, values, _, _) in enumerate(rows):
        matrix[[i] * len(columns), columns] = values
    constraint = LinearConstraint(matrix.tocsr(), [row[2] for row in rows], [row[3] for row in rows])
    integral = (np.arange(len(costs)) < starts[-1]).astype(int)
    found = milp(costs, constraints=constraint, integrality=integral, bounds=Bounds(0, 1), options={"mip_rel_gap": 0.0})
    assert found.success
    return float(found.fun)


@pytest.mark.parametrize(("layers", "operators", "size", "hub"), [(4, 4, 4, 0), (6, 3, 3, 0), (3, 5, 5, 3), (5, 3, 4, 2)])
def test_against_an_integer_program(layers: int, operators: int, size: int, hub: int) -> None:
    graph = layered_graph(layers=layers, operators=operators, size=size, hub=hub, seed=layers)
    free = solve(graph)
    assert free.gap == 0.0
    assert free.cost == pytest.approx(integer_optimum(graph), rel=1e-7)
    limit = math.floor(0.9 * free.memory)
    limited = solve(graph, memory_limit=limit)
    optimum = integer_optimum(graph, limit)
    assert limited.memory <= limit
    assert limited.lower_bound <= optimum * (1 + 1e-6)
    assert limited.cost == pytest.approx(optimum, rel=1e-6 + limited.gap)


@pytest.mark.parametrize("hub", [0, 3])
def test_work_grows_with_the_logarithm_of_the_layers(hub: int) -> None:
    joins = {
        layers: len(schedule(reduce(layered_graph(layers=layers, operators=10, size=6, hub=hub)).graph).joins) for layers in (16, 64, 256)
    }
    assert joins[256] < 100
    assert all(later - sooner <= 24 for sooner, later in pairwise(joins.values()))


def test_equal_tables_need_not_be_the_same_objects() -> None:
    shared = layered_graph(layers=16, operators=6, size=4)
    copied = CostGraph(
        sizes=shared.sizes,
        unary=tuple(table.copy() for table in shared.unary),
        edges={edge: np.asfortranarray(table) for edge, table in shared.edges.items()},
        memory=shared.memory,
    )
    assert len(schedule(reduce(copied).graph).joins) == len(schedule(reduce(shared).graph).joins)
    assert solve(copied).choices == solve(shared).choices


@pytest.mark.parametrize("fraction", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("hub", [0, 4])
def test_a_memory_limit_on_many_layers(hub: int, fraction: float) -> None:
    graph = layered_graph(layers=48, operators=6, size=8, hub=hub)
    limit = fraction * solve(graph).memory
    try:
        found = solve(graph, memory_limit=limit)
    except Infeasible as error:
        assert error.minimum_memory > limit
        return
    assert found.memory <= limit
    assert found.gap < 5e-3
    assert found.cost >= solve(graph).cost
    assert found.cost <= solve(graph, method="recursive_programming", memory_limit=limit).cost


def test_recursive_programming_keeps_the_bound() -> None:
    for seed in range(5):
        graph = layered_graph(layers=8, operators=5, size=6, seed=seed)
        exact, fast = solve(graph), solve(graph, method="recursive_programming")
        assert fast.lower_bound <= exact.cost <= fast.cost
