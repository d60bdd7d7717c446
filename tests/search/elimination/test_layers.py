"""Graphs of equal layers: the work grows with the logarithm of the layers, and memory limits are
kept on many.
"""

from itertools import pairwise

import numpy as np
import pytest
from search_graphs import layered_graph

from autopar.search import CostGraph, Infeasible, solve
from autopar.search.elimination.order_choice import schedule
from autopar.search.elimination.pruning import reduce


@pytest.mark.parametrize("hub", [0, 3])
def test_work_grows_with_the_logarithm_of_the_layers(hub: int) -> None:
    joins = {
        layers: len(
            schedule(
                reduce(layered_graph(layers=layers, operators=10, size=6, hub=hub)).graph
            ).joins
        )
        for layers in (16, 64, 256)
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
        solution = solve(graph, memory_limit=limit)
    except Infeasible as error:
        assert error.minimum_memory > limit
        return
    assert solution.memory <= limit
    assert solution.gap < 5e-3
    assert solution.cost >= solve(graph).cost
    assert solution.cost <= solve(graph, method="recursive_programming", memory_limit=limit).cost
