"""Branch and bound on bytes ends when its work is spent, with a bound that holds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autopar.search import Infeasible, NoAssignment, exhaustive
from autopar.search.elimination.conditioning import Minimiser, prepare
from autopar.search.memory import halving
from autopar.search.memory.lagrangian import Dual, dual_of, unheard
from autopar.search.memory.lines import Point
from tests.search.search_graphs import random_graph


def open_cases() -> list[tuple[float, float, Minimiser, Dual, Point]]:
    """The optimum within a limit, the limit, and where prices end: of random graphs."""
    cases = []
    for seed in range(60):
        graph = random_graph(seed)
        try:
            limit = 0.6 * exhaustive(graph).memory
            optimum = exhaustive(graph, memory_limit=limit).cost
        except (Infeasible, NoAssignment):
            continue
        _, solver = prepare(graph)
        dual, best, _ = dual_of(solver, limit, close=0.0)
        if dual is not None:
            cases.append((optimum, limit, solver, dual, best))
    return cases


def test_it_ends_when_its_work_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[float] = []

    def noted(*arguments: Any, **named: Any) -> Any:
        starts.append(named["known"].start)
        return dual_of(*arguments, **named)

    monkeypatch.setattr(halving, "dual_of", noted)
    ended = 0
    for optimum, limit, solver, dual, best in open_cases():
        nodes: list[int] = []
        for work in (math.inf, 1.0):
            monkeypatch.setattr(halving, "WORK", work)
            starts.clear()
            point, bound = halving.halve(solver, limit, dual, best, math.inf, unheard)
            assert bound - 1e-9 <= optimum <= point.cost + 1e-9
            assert set(starts[:2]) <= {dual.price}, "the first children start at the root's price"
            nodes.append(len(starts))
        # A child that nothing fits takes no work that counts.
        ended += nodes[1] < nodes[0]
        assert nodes[1] <= nodes[0]
    assert ended
