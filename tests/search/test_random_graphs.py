"""On 10,000 small random graphs the searches agree with looking at every assignment, within a limit
of memory up to 1 %.
"""

import numpy as np
import pytest
from certificate import check as check_certificate
from certifying import certify
from search_graphs import random_family, random_graph

from autopar.search import CostGraph, Infeasible, Solution
from tests.search.attempts import attempt

SLACK = 1e-9
NEAR = 1e-2
"""How much worse than the best a search may be within a limit of memory."""
BLOCK = 100


def some_limit(graph: CostGraph, seed: int) -> float:
    assert graph.memory is not None
    return float(
        np.random.default_rng(seed).integers(0, sum(table.max() for table in graph.memory) + 2)
    )


def check(graph: CostGraph, limit: float | None) -> float:
    """Compare the searches; the gap of the exact one."""
    gap = 0.0
    truth = attempt(graph, "exhaustive", limit)
    for method in ("dynamic_programming", "recursive_programming"):
        outcome = attempt(graph, method, limit)
        assert type(outcome) is type(truth)
        if isinstance(truth, Infeasible):
            assert (
                isinstance(outcome, Infeasible) and outcome.minimum_memory == truth.minimum_memory
            )
        if not isinstance(truth, Solution) or not isinstance(outcome, Solution):
            continue
        assert outcome.cost == graph.cost(outcome.choices) and outcome.memory == graph.memory_of(
            outcome.choices
        )
        assert outcome.lower_bound - SLACK <= truth.cost <= outcome.cost + SLACK
        assert limit is None or outcome.memory <= limit
        verdict = check_certificate(graph, certify(graph, outcome))
        assert verdict.valid, verdict.reason
        assert verdict.bound <= truth.cost + SLACK
        if method == "dynamic_programming":
            # Within a limit a gap of 1 % is not closed.
            off = SLACK if limit is None else NEAR
            assert outcome.cost == pytest.approx(truth.cost, rel=off, abs=SLACK)
            assert limit is not None or outcome.gap < SLACK
            gap = outcome.gap
    return gap


def check_block(start: int) -> None:
    gaps = []
    for seed in range(start, start + BLOCK):
        graph = random_family(seed)
        check(graph, None)
        gaps.append(check(graph, some_limit(graph, seed)))
    assert np.mean(gaps) < NEAR / 2


@pytest.mark.parametrize("start", range(0, 1000, BLOCK))
def test_against_exhaustive(start: int) -> None:
    check_block(start)


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start, marks=pytest.mark.ci) if start < 2000 else start
        for start in range(1000, 10000, BLOCK)
    ],
)
def test_against_exhaustive_on_many_more(start: int) -> None:
    check_block(start)


@pytest.mark.parametrize("method", ["dynamic_programming", "recursive_programming"])
def test_same_graph_same_solution(method: str) -> None:
    for seed in range(30):
        first = random_graph(seed)
        second = random_graph(seed)
        outcomes = [attempt(graph, method, some_limit(graph, seed)) for graph in (first, second)]
        assert repr(outcomes[0]) == repr(outcomes[1])
