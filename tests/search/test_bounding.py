"""Bounds within a memory limit against enumeration, and against the best price."""

from __future__ import annotations

import math

import pytest

from autopar.search import Infeasible, NoAssignment, exhaustive, lagrangian
from autopar.search.bounding import bound_within

from .search_graphs import random_graph


@pytest.mark.parametrize("seed", range(60))
def test_no_assignment_within_the_limit_undercuts_a_bound(seed: int) -> None:
    graph = random_graph(seed)
    try:
        free = exhaustive(graph)
    except NoAssignment:
        return
    for share in (1.0, 0.8, 0.6):
        limit = share * max(free.memory, 1e-9)
        try:
            best = exhaustive(graph, memory_limit=limit).cost
        except Infeasible:
            best = math.inf
        for price in (0.0, 1e-3, 10.0):
            found = bound_within(graph, limit, price=price)
            assert found.bound <= best + 1e-9 * abs(best if best < math.inf else 0.0)
            assert len(found.choices) == len(graph.sizes)


@pytest.mark.parametrize("seed", range(20))
def test_a_bound_is_nearly_that_of_the_best_price(seed: int) -> None:
    graph = random_graph(seed)
    limit = 0.8 * exhaustive(graph).memory
    try:
        known = lagrangian(graph, memory_limit=limit)
    except Infeasible:
        return
    spread = known.cost - exhaustive(graph).cost
    assert bound_within(graph, limit).bound >= known.lower_bound - 0.1 * max(spread, 1e-9) - 1e-9 * abs(known.cost)
    assert bound_within(graph, limit, enough=-math.inf).price == 0.0
