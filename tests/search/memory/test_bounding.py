"""Bounds within a memory limit against enumeration, and against the best price."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from autopar.search import Infeasible, NoAssignment, exhaustive, lagrangian
from autopar.search.costgraph import memory_tables
from autopar.search.elimination.conditioning import Minimiser, prepare
from autopar.search.memory import bounding
from autopar.search.memory.bounding import bound_within
from autopar.search.memory.halving import Node, children_of
from tests.search.search_graphs import random_graph


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
            bound = bound_within(graph, limit, price=price)
            assert bound.bound <= best + 1e-9 * abs(best if best < math.inf else 0.0)
            assert len(bound.choices) == len(graph.sizes)


@pytest.mark.parametrize("seed", range(20))
def test_a_bound_is_nearly_that_of_the_best_price(seed: int) -> None:
    graph = random_graph(seed)
    limit = 0.8 * exhaustive(graph).memory
    try:
        known = lagrangian(graph, memory_limit=limit)
    except Infeasible:
        return
    spread = known.cost - exhaustive(graph).cost
    assert bound_within(graph, limit).bound >= known.lower_bound - 0.1 * max(
        spread, 1e-9
    ) - 1e-9 * abs(known.cost)
    assert bound_within(graph, limit, enough=-math.inf).price == 0.0


def test_prices_end_where_the_lines_of_both_sides_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    minimise = Minimiser.minimise

    def counted(solver: Minimiser, price: float, *args: Any, **options: Any) -> Any:
        tried.append(price)
        return minimise(solver, price, *args, **options)

    monkeypatch.setattr(Minimiser, "minimise", counted)
    counts = []
    for seed in range(20):
        graph = random_graph(seed)
        tried.clear()
        bound_within(graph, 0.8 * exhaustive(graph).memory)
        counts.append(len(tried))
    assert min(counts) == 1, "no second price where the whole graph fits"
    several = [count for count in counts if count > 1]
    assert sum(several) < 0.9 * bounding.PRICES * len(several), (
        "most searches end before the prices run out"
    )


@pytest.mark.parametrize("seed", range(20))
def test_halves_of_a_node_divide_its_choices(seed: int) -> None:
    _, solver = prepare(random_graph(seed))
    graph = solver.graph
    memory = memory_tables(graph)
    over = [int(table.argmax()) for table in memory]
    within = [int(table.argmin()) for table in memory]
    remaining = [np.arange(size) for size in graph.sizes]
    halves = children_of(solver, Node(remaining=remaining, price=0.0, over=over, within=within))
    if all(table.max() == table.min() for table in memory):
        assert halves == []
        return
    sizes = [[len(kept) for kept in half] for half in halves]
    (halved,) = (
        v
        for v, (first, second) in enumerate(zip(*sizes, strict=True))
        if first != graph.sizes[v] or second != graph.sizes[v]
    )
    assert sizes[0][halved] + sizes[1][halved] == graph.sizes[halved]
    assert memory[halved][halves[0][halved]].max() < memory[halved][halves[1][halved]].min()


@pytest.mark.parametrize("seed", range(20))
def test_a_bound_that_must_be_enough_is_enough_or_left(seed: int) -> None:
    graph = random_graph(seed)
    try:
        free = exhaustive(graph)
        best = exhaustive(graph, memory_limit=0.7 * free.memory).cost
    except (Infeasible, NoAssignment):
        return
    if best == 0.0:
        return
    full = bound_within(graph, 0.7 * free.memory)
    for enough in (0.5 * full.bound, 2.0 * best):
        bound = bound_within(graph, 0.7 * free.memory, enough=enough)
        assert (bound.bound >= enough) == (enough < full.bound) and bound.bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_narrow_tables_come_first_where_wide_ones_are_much_work(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = random_graph(seed)
    try:
        limit = 0.8 * exhaustive(graph).memory
        best = exhaustive(graph, memory_limit=limit).cost
    except (Infeasible, NoAssignment):
        return
    full = bound_within(graph, limit)
    widths: list[int] = []
    minimise = Minimiser.minimise

    def counted(solver: Minimiser, *args: Any, **options: Any) -> Any:
        widths.append(solver.max_entries)
        return minimise(solver, *args, **options)

    monkeypatch.setattr(Minimiser, "minimise", counted)
    monkeypatch.setattr(bounding, "HEAVY_WORK", -1.0)
    monkeypatch.setattr(bounding, "QUICK", 1)
    quick = bound_within(graph, limit, enough=-math.inf)
    assert quick.bound <= best + 1e-9 * abs(best) and max(widths) < bounding.ENTRIES, (
        "what is enough needs no wide tables"
    )
    bound = bound_within(graph, limit)
    assert full.bound - 0.1 * abs(best) - 1e-9 <= bound.bound <= best + 1e-9 * abs(best)
    assert max(widths) == bounding.ENTRIES
