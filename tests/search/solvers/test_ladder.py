"""Graphs whose exact tables would take too long: narrow tables come first, and wider ones only
while the gap asks for them.
"""

from __future__ import annotations

import pytest
from search_graphs import clique

from autopar.search import Infeasible, dynamic_programming, solve
from autopar.search.elimination.conditioning import Minimiser
from autopar.search.solvers.dynamic_programming import eliminate_variables


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every exact table counts as too much work; the widths tried are collected."""
    module = dynamic_programming.__globals__
    monkeypatch.setitem(module, "EXACT_WORK", 0.0)
    monkeypatch.setitem(module, "NARROW", (27, 81))
    tried: list[int] = []
    assign = module["_assign"]

    def noted(known: object, small: object, solver: Minimiser) -> None:
        tried.append(solver.max_entries)
        assign(known, small, solver)

    monkeypatch.setitem(module, "_assign", noted)
    return tried


@pytest.mark.parametrize("seed", range(4))
def test_a_narrow_answer_has_a_certified_gap(widths: list[int], seed: int) -> None:
    graph = clique(count=8, size=3, seed=seed)
    exact = solve(graph, method="exhaustive")
    solution = eliminate_variables(graph, memory_limit=None, max_entries=1 << 20)
    assert widths == [27]
    assert solution.lower_bound <= exact.cost <= solution.cost
    assert solution.gap > 0.0


def test_wider_tables_narrow_the_gap(widths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dynamic_programming.__globals__, "EXACT_WORK", 1e4)
    graph = clique(count=9, size=3, seed=1)
    alone = eliminate_variables(graph, memory_limit=None, max_entries=27)
    widths.clear()
    solution = eliminate_variables(graph, memory_limit=None, max_entries=1 << 20)
    assert widths == [27, 81]
    assert alone.lower_bound < solution.lower_bound <= solution.cost <= alone.cost


def test_memory_that_narrow_tables_miss_is_found_by_wide_ones(
    widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dynamic_programming.__globals__, "NARROW", (3,))
    missed = 0
    for seed in range(12):
        graph = clique(count=8, size=3, seed=seed, forbidden=0.15)
        with pytest.raises(Infeasible) as caught:
            solve(graph, method="exhaustive", memory_limit=0.0)
        least = caught.value.minimum_memory
        widths.clear()
        solution = eliminate_variables(graph, memory_limit=least, max_entries=1 << 20)
        assert solution.memory <= least and solution.cost < float("inf")
        missed += len(widths) > 1
    assert missed
