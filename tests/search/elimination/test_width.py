"""Too wide a graph is not refused.

The search fixes some variables, and its bound is still a bound.
"""

import math
import sys

import pytest
from search_graphs import clique, random_graph

from autopar.search import CostGraph, Infeasible, NoAssignment, nearly, solve
from autopar.search.elimination.order_choice import schedule
from autopar.search.elimination.pruning import Reduction, reduce
from autopar.search.solvers.dynamic_programming import Aim, eliminate_variables


def test_no_table_exceeds_the_width() -> None:
    graph = clique(count=8, size=3, seed=0)
    assert not schedule(graph).too_wide
    assert len(schedule(graph, max_entries=27).too_wide) == 4


@pytest.mark.parametrize("forbidden", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(6))
def test_bounds_of_a_clique(seed: int, forbidden: float) -> None:
    graph = clique(count=8, size=3, seed=seed, forbidden=forbidden)
    exact = solve(graph, method="exhaustive")
    bounded = eliminate_variables(graph, memory_limit=None, max_entries=27)
    assert bounded.lower_bound <= exact.cost <= bounded.cost
    assert bounded.gap < 1.0
    with pytest.raises(Infeasible) as caught:
        eliminate_variables(graph, memory_limit=0.0, max_entries=27)
    limit = max(0.9 * exact.memory, caught.value.minimum_memory)
    within = solve(graph, method="exhaustive", memory_limit=limit)
    bounded = eliminate_variables(graph, memory_limit=limit, max_entries=27)
    assert bounded.lower_bound <= within.cost <= bounded.cost
    assert bounded.memory <= limit


def test_bounds_of_random_graphs() -> None:
    for seed in range(200):
        graph = random_graph(seed)
        for limit in (None, 12.0):
            try:
                exact = solve(graph, method="exhaustive", memory_limit=limit)
            except (Infeasible, NoAssignment):
                continue
            bounded = eliminate_variables(graph, memory_limit=limit, max_entries=3)
            assert bounded.lower_bound - 1e-9 <= exact.cost <= bounded.cost + 1e-9
            assert limit is None or bounded.memory <= limit


def test_a_gap_that_is_close_enough_is_left() -> None:
    """The bound holds, the gap is what was asked for or all that can be had, and some graphs are
    left before their optimum is proven.
    """
    sooner = 0
    for seed in range(12):
        graph = clique(count=8, size=3, seed=seed)
        exact = solve(graph, method="exhaustive").cost
        whole, near = (
            eliminate_variables(graph, memory_limit=None, max_entries=27, aim=Aim(close=close))
            for close in (1e-9, 0.4)
        )
        assert near.lower_bound <= exact * (1 + 1e-9) and exact <= near.cost * (1 + 1e-9)
        assert near.gap <= max(0.4, whole.gap + 1e-9)
        sooner += near.gap > whole.gap + 1e-6
    assert sooner


def test_a_bound_that_is_enough_is_left() -> None:
    """The bound holds and is what was asked for, or all that can be had; some graphs are left
    before their optimum is proven.
    """
    sooner = 0
    for seed in range(12):
        graph = clique(count=8, size=3, seed=seed)
        exact = solve(graph, method="exhaustive").cost
        whole = eliminate_variables(graph, memory_limit=None, max_entries=27)
        near = eliminate_variables(
            graph, memory_limit=None, max_entries=27, aim=Aim(enough=0.7 * exact)
        )
        assert near.lower_bound <= exact * (1 + 1e-9) and exact <= near.cost * (1 + 1e-9)
        assert near.lower_bound >= min(0.7 * exact, whole.lower_bound) - 1e-9
        sooner += near.lower_bound < whole.lower_bound - 1e-9
    assert sooner


def test_what_is_not_too_wide_is_solved_exactly_however_close() -> None:
    for seed in range(20):
        graph = random_graph(seed)
        try:
            exact = solve(graph)
        except NoAssignment:
            continue
        assert nearly(graph, close=1.0).choices == exact.choices


def test_what_takes_too_many_bytes_is_left_sooner() -> None:
    """An assignment that does not fit is as near as is asked of it.

    One that fits is the optimum.
    """
    sooner = 0
    for seed in range(12):
        graph = clique(count=8, size=3, seed=seed)
        whole = eliminate_variables(graph, memory_limit=None, max_entries=27)
        for room in (0.0, math.inf):
            near = eliminate_variables(
                graph, memory_limit=None, max_entries=27, aim=Aim(room=room, loose=0.4)
            )
            assert near.gap <= max(0.4, whole.gap + 1e-9)
            sooner += near.gap > whole.gap + 1e-6
            assert near.memory > room or near.gap <= whole.gap + 1e-9
    assert sooner


@pytest.mark.parametrize(("light", "times"), [(math.inf, 0), (0.0, 1)])
def test_a_light_relaxation_is_not_pruned_first(
    light: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["autopar.search.solvers.dynamic_programming"]
    pruned: list[bool] = []

    def counted(graph: CostGraph, **options: bool) -> Reduction:
        pruned.append(True)
        return reduce(graph, **options)

    monkeypatch.setattr(module, "LIGHT_WORK", light)
    monkeypatch.setattr(module, "reduce", counted)
    graph = clique(count=8, size=3, seed=0)
    exact = solve(graph, method="exhaustive")
    near = eliminate_variables(graph, memory_limit=None, max_entries=27, aim=Aim(close=1.0))
    assert len(pruned) == times and near.lower_bound <= exact.cost <= near.cost
