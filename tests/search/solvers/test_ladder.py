"""Graphs whose exact tables would take too long: narrow tables come first, and wider ones only
while the gap asks for them; within a limit one width is enough.
"""

from __future__ import annotations

from typing import Any

import pytest
from certificate import check
from certifying import certify
from search_graphs import clique

from autopar.search import Infeasible, dynamic_programming, recursive_programming, solve
from autopar.search.elimination.conditioning import Minimiser
from autopar.search.solvers.dynamic_programming import eliminate_variables


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every exact table counts as too much work; the widths tried are collected."""
    module = dynamic_programming.__globals__
    monkeypatch.setitem(module, "EXACT_WORK", 0.0)
    monkeypatch.setitem(module, "NARROW", (27, 81))
    tried: list[int] = []
    for name in ("_assign", "_assign_within"):

        def noted(
            known: object,
            small: object,
            solver: Minimiser,
            *limit: float,
            assign: Any = module[name],
        ) -> Any:
            tried.append(solver.max_entries)
            return assign(known, small, solver, *limit)

        monkeypatch.setitem(module, name, noted)
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


@pytest.mark.parametrize("seed", range(4))
def test_a_limit_is_kept_with_tables_of_one_width(
    widths: list[int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The widest ones that are not too much work, and the narrowest if all are."""
    graph = clique(count=8, size=3, seed=seed)
    limit = 0.8 * solve(graph).memory
    exact = solve(graph, method="exhaustive", memory_limit=limit)
    work = Minimiser(graph, max_entries=81).plan.work
    for most, width in ((0.0, 27), (work, 81)):
        monkeypatch.setitem(dynamic_programming.__globals__, "EXACT_WORK", most)
        widths.clear()
        solution = eliminate_variables(graph, memory_limit=limit, max_entries=1 << 20)
        assert widths == [width]
        assert solution.memory <= limit
        assert solution.lower_bound <= exact.cost <= solution.cost


def test_what_the_fast_search_met_stays_where_no_table_meets_more(
    widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = clique(count=8, size=3, seed=1)
    limit = 0.8 * solve(graph).memory
    fast = recursive_programming(graph, memory_limit=limit)

    def missed(*arguments: object, **named: object) -> None:
        raise Infeasible(2.0 * limit, limit)

    monkeypatch.setitem(dynamic_programming.__globals__, "constrained", missed)
    widths.clear()
    solution = eliminate_variables(graph, memory_limit=limit, max_entries=1 << 20)
    assert widths == [27, 81, 1 << 20]
    assert (solution.cost, solution.lower_bound) == (fast.cost, fast.lower_bound)
    assert check(graph, certify(graph, solution)).valid
    with pytest.raises(Infeasible):
        eliminate_variables(graph, memory_limit=0.0, max_entries=1 << 20)
