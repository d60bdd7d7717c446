"""The integer program agrees with looking at every assignment, and with elimination on equal
layers.
"""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from search_graphs import clique, layered_graph, random_family

from autopar.search import CostGraph, Infeasible, Solution, integer_program, solve
from autopar.search.solvers.integer_program import NotSolved
from tests.search.attempts import attempt

program_module = sys.modules[NotSolved.__module__]
"""The module, whose name in the package is that of its function."""


@pytest.mark.parametrize("limited", [False, True])
def test_against_exhaustive(limited: bool) -> None:
    kinds = set()
    for seed in range(60):
        graph = random_family(seed)
        limit = float(np.random.default_rng(seed).integers(0, 40)) if limited else None
        truth, actual, exact = (
            attempt(graph, method, limit)
            for method in ("exhaustive", "integer_program", "dynamic_programming")
        )
        kinds.add(type(truth))
        assert type(actual) is type(truth)
        if isinstance(truth, Infeasible):
            assert isinstance(actual, Infeasible) and actual.minimum_memory == truth.minimum_memory
        if (
            isinstance(truth, Solution)
            and isinstance(actual, Solution)
            and isinstance(exact, Solution)
        ):
            assert actual.cost == pytest.approx(truth.cost, rel=1e-7, abs=1e-9)
            assert exact.cost == pytest.approx(actual.cost, rel=1e-7, abs=1e-9)
            assert actual.gap == 0.0 and (limit is None or actual.memory <= limit)
    assert len(kinds) == 2 + limited


@pytest.mark.parametrize(("status", "share"), [(0, 1.0), (1, 0.5)])
def test_what_ran_out_of_time_proves_no_more_than_its_bound(
    status: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiGHS's status 0 is a proven optimum, 1 the best assignment within the time, with a bound of
    its own.
    """
    graph = layered_graph(layers=3, operators=3, size=3, hub=0)
    whole = program_module._Program.solve

    def solved(self: Any, costs: Any, *limits: Any) -> Any:
        solution = whole(self, costs, *limits)
        return SimpleNamespace(
            status=status, x=solution.x, mip_dual_bound=0.5 * solution.mip_dual_bound, message=""
        )

    monkeypatch.setattr(program_module._Program, "solve", solved)
    solution = integer_program(graph)
    assert solution.lower_bound == pytest.approx(share * solution.cost, rel=1e-6)


@pytest.mark.parametrize(("layers", "operators", "size", "hub"), [(6, 3, 3, 0), (3, 5, 5, 3)])
def test_against_elimination(layers: int, operators: int, size: int, hub: int) -> None:
    graph = layered_graph(layers=layers, operators=operators, size=size, hub=hub, seed=layers)
    free = solve(graph)
    assert integer_program(graph).cost == pytest.approx(free.cost, rel=1e-7)
    limit = np.floor(0.9 * free.memory)
    limited = solve(graph, memory_limit=limit)
    truth = integer_program(graph, memory_limit=limit)
    assert limited.memory <= limit and truth.memory <= limit
    assert limited.lower_bound <= truth.cost * (1 + 1e-6)
    assert limited.cost == pytest.approx(truth.cost, rel=1e-6 + limited.gap)


def test_small_costs_are_told_apart() -> None:
    """HiGHS works with absolute tolerances: microseconds are scaled before it sees them."""
    tiny = layered_graph(layers=3, operators=3, size=4)
    tiny = CostGraph(
        sizes=tiny.sizes,
        unary=tuple(1e-9 * u for u in tiny.unary),
        edges={e: 1e-9 * t for e, t in tiny.edges.items()},
    )
    assert integer_program(tiny).cost == pytest.approx(solve(tiny).cost, rel=1e-7)


def test_without_time_it_says_so() -> None:
    with pytest.raises(NotSolved, match="not solved") as caught:
        integer_program(clique(count=14, size=12, seed=0), time_limit=0.01)
    assert (
        caught.value.lower_bound
        <= solve(clique(count=14, size=12, seed=0), method="recursive_programming").cost
    )
