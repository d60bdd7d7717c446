"""Elimination of small tables equals enumeration; it decides only where a table is too wide."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.elimination import greedy
from autopar.search.elimination.greedy import planned
from autopar.search.elimination.messages import totals

Tables = tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]


def tables(sizes: list[int], density: float, seed: int) -> Tables:
    draw = np.random.default_rng(seed)
    pairs = itertools.combinations(range(len(sizes)), 2)
    return [draw.random(size) for size in sizes], {
        (u, v): draw.random((sizes[u], sizes[v])) for u, v in pairs if draw.random() < density
    }


def cost(problem: Tables, choices: tuple[int, ...]) -> float:
    unary, edges = problem
    own = sum(table[choice] for table, choice in zip(unary, choices, strict=True))
    return float(own + sum(table[choices[u], choices[v]] for (u, v), table in edges.items()))


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from([0.0, 0.3, 0.7, 1.0]), st.integers(0, 10**6))
def test_plans_of_narrow_graphs_are_exact(sizes: list[int], density: float, seed: int) -> None:
    problem = tables(sizes, density, seed)
    least = min(cost(problem, x) for x in itertools.product(*map(range, sizes)))
    plan = planned(sizes, problem[1])
    assert plan.is_exact
    assert cost(problem, tuple(plan.assign(*problem))) == pytest.approx(least, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from([0.3, 0.7, 1.0]), st.integers(0, 10**6))
def test_totals_never_exceed_the_optimum(sizes: list[int], density: float, seed: int) -> None:
    problem = tables(sizes, density, seed)
    least = min(cost(problem, x) for x in itertools.product(*map(range, sizes)))
    for total in totals(*problem, 2):
        assert total.min() <= least + 1e-9


def test_totals_of_a_tree_are_the_least_costs_with_each_choice() -> None:
    unary, _ = tables([3, 2, 4, 3, 2], 0.0, 1)
    draw = np.random.default_rng(2)
    ends = ((0, 1), (1, 2), (1, 3), (3, 4))
    edges = {(u, v): draw.random((len(unary[u]), len(unary[v]))) for u, v in ends}
    every = list(itertools.product(*(range(len(table)) for table in unary)))
    for v, total in enumerate(totals(unary, edges, 1)):
        wanted = [
            min(cost((unary, edges), x) for x in every if x[v] == choice)
            for choice in range(len(unary[v]))
        ]
        assert total == pytest.approx(wanted, rel=1e-12)


def test_a_wide_graph_is_decided_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tables([4] * 8, 1.0, 3)
    monkeypatch.setattr(greedy, "WIDTH", 64)
    plan = planned([4] * 8, problem[1])
    assert not plan.is_exact and len(plan.turns) == 8
    choices = plan.assign(*problem)
    assert cost(problem, tuple(choices)) < 1.5 * min(
        cost(problem, tuple(x)) for x in np.random.default_rng(0).integers(0, 4, (500, 8))
    )
