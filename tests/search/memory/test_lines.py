"""Bounds at some prices of a byte bound every limit, and spare prices where a graph is solved
within another one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.search import CostGraph, Infeasible, NoAssignment
from autopar.search.elimination.conditioning import Minimiser
from autopar.search.elimination.shared_orders import sharing_orders
from autopar.search.memory.bounding import bound_within
from autopar.search.memory.lines import Lines, Point, lines_of
from autopar.search.solvers.exhaustive import exhaustive
from autopar.search.solvers.relaxation import lagrangian
from tests.search.search_graphs import random_graph


def test_the_sides_are_those_whose_lines_cross_lowest() -> None:
    lines = Lines()
    dear, steep, flat = (
        Point(choices=[n], cost=cost, memory=memory)
        for n, (cost, memory) in enumerate(((9.0, 1.0), (1.0, 9.0), (3.0, 6.0)))
    )
    for price, least, line in ((0.0, 1.0, steep), (0.5, 6.0, flat), (4.0, 13.0, dear)):
        lines.add(price, least, line)
    assert lines.sides(5.0) == (flat, dear) and lines.best(5.0) is dear
    assert lines.sides(7.0) == (steep, flat) and lines.best(0.5) is None
    highest = lines.highest(5.0)
    assert highest.price == 0.5 and highest.bound(5.0) == 3.5


@pytest.mark.parametrize("seed", range(20))
def test_another_limit_begins_at_the_prices_that_are_known(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = random_graph(seed)
    free = exhaustive(graph).memory
    tried: list[float] = []
    minimise = Minimiser.minimise

    def counted(solver: Minimiser, price: float = 0.0, *args: Any, **options: Any) -> Any:
        tried.append(price)
        return minimise(solver, price, *args, **options)

    monkeypatch.setattr(Minimiser, "minimise", counted)
    for share in (0.8, 0.7):
        try:
            best = exhaustive(graph, memory_limit=share * free).cost
            lagrangian(graph, memory_limit=share * free)
        except Infeasible:
            return
        tried.clear()
        alone = lagrangian(graph, memory_limit=share * free)
        prices = len(tried)
        with sharing_orders():
            bound_within(graph, share * free)
            lagrangian(graph, memory_limit=0.75 * free)
            tried.clear()
            again = lagrangian(graph, memory_limit=share * free)
        assert len(tried) < prices, (
            "neither the optimum without a limit nor the same prices are tried again"
        )
        for solution in (alone, again):
            assert solution.lower_bound <= best * (1 + 1e-9) and solution.cost >= best * (1 - 1e-9)


def test_a_graph_like_the_last_one_starts_at_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = next(g for g in map(random_graph, range(50)) if _binds(g))
    limit = 0.8 * exhaustive(graph).memory
    tried: list[float] = []
    minimise = Minimiser.minimise

    def noted(solver: Minimiser, price: float = 0.0, *args: Any, **options: Any) -> Any:
        tried.append(price)
        return minimise(solver, price, *args, **options)

    with sharing_orders():
        lagrangian(graph, memory_limit=limit)
        best = lines_of(graph).tried[-1].price
        monkeypatch.setattr(Minimiser, "minimise", noted)
        again = lagrangian(replace(graph), memory_limit=limit)
    assert best > 0 and tried[0] == best
    assert again.memory <= limit and again.lower_bound <= exhaustive(
        graph, memory_limit=limit
    ).cost * (1 + 1e-9)


def _binds(graph: CostGraph) -> bool:
    """Whether a graph takes less memory at a price."""
    try:
        free = exhaustive(graph)
        return free.cost > 0 and exhaustive(graph, memory_limit=0.8 * free.memory).cost > free.cost
    except (Infeasible, NoAssignment):
        return False
