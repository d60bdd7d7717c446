"""Graphs too wide for exact tables: filters and tightened bounds find the optimum all the same,
with narrow tables.
"""

import pytest
from certificate import check
from certifying import certify
from search_graphs import clique, layered_graph

from autopar.search import CostGraph, Infeasible, dynamic_programming, solve
from autopar.search.elimination.conditioning import Minimiser, prepare
from autopar.search.elimination.filtering import marginals
from autopar.search.solvers.dynamic_programming import eliminate_variables


@pytest.fixture(autouse=True)
def no_exact_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dynamic_programming.__globals__, "EXACT_WORK", 3e3)
    monkeypatch.setitem(dynamic_programming.__globals__, "NARROW", (9, 81))


def least_memory_of(graph: CostGraph) -> float:
    """The least memory of any assignment."""
    with pytest.raises(Infeasible) as caught:
        solve(graph, method="exhaustive", memory_limit=0.0)
    return caught.value.minimum_memory


@pytest.mark.parametrize("forbidden", [0.0, 0.1])
def test_cliques(forbidden: float) -> None:
    optimal = 0
    for seed in range(12):
        graph = clique(count=7, size=3, seed=seed, forbidden=forbidden)
        truth = solve(graph, method="exhaustive")
        solution = eliminate_variables(graph, memory_limit=None, max_entries=1 << 20)
        assert solution.lower_bound - 1e-9 <= truth.cost <= solution.cost + 1e-9
        assert check(graph, certify(graph, solution)).valid
        optimal += solution.gap < 1e-9
    assert optimal >= 5, optimal


@pytest.mark.parametrize("fraction", [None, 0.9])
def test_layers_with_a_hub(fraction: float | None) -> None:
    for seed in range(4):
        graph = layered_graph(layers=3, operators=3, size=3, seed=seed, hub=3)
        limit = (
            None
            if fraction is None
            else max(fraction * solve(graph, method="exhaustive").memory, least_memory_of(graph))
        )
        truth = solve(graph, method="exhaustive", memory_limit=limit)
        solution = eliminate_variables(graph, memory_limit=limit, max_entries=27)
        assert solution.lower_bound - 1e-9 <= truth.cost <= solution.cost + 1e-9


def test_merged_and_cut_relaxations_bound() -> None:
    for seed in range(8):
        graph: CostGraph = clique(count=6, size=3, seed=seed)
        truth = solve(graph, method="exhaustive").cost
        small, _ = prepare(graph, max_entries=9)
        solver = Minimiser(small.graph, max_entries=9)
        first = solver.minimise()
        solver.tighten(marginals(solver.plan, first.tables), 0.1)
        tightened = solver.minimise().bound
        solver.max_entries = 27
        solver.merge()
        merged = solver.minimise().bound
        assert len(solver.origins) < len(small.graph.sizes) + 30
        assert first.bound <= tightened + 1e-9 and tightened <= merged + 1e-9
        assert merged <= truth + 1e-9


def test_a_hub_is_settled_by_its_relaxation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing else was to be tried")

    graph = layered_graph(layers=6, operators=5, size=6, seed=1, hub=6)
    truth = solve(graph)
    monkeypatch.setitem(dynamic_programming.__globals__, "HOPEFUL", 1.0)
    monkeypatch.setitem(dynamic_programming.__globals__, "_offer_fast", refuse)
    solution = eliminate_variables(graph, memory_limit=None, max_entries=36)
    assert solution.cost == pytest.approx(truth.cost, rel=1e-9) and solution.gap < 1e-9
