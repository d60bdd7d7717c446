"""Min-marginals against looking at every assignment, and what they rule out."""

import itertools

import numpy as np
import pytest
from search_graphs import clique, random_graph

from autopar.search import CostGraph
from autopar.search.elimination import filtering
from autopar.search.elimination.conditioning import Minimiser
from autopar.search.elimination.derived_graphs import restrict
from autopar.search.elimination.filtering import marginals
from autopar.search.elimination.order_choice import schedule


def by_enumeration(graph: CostGraph) -> list[np.ndarray]:
    least = [np.full(size, np.inf) for size in graph.sizes]
    for choices in itertools.product(*map(range, graph.sizes)):
        cost = graph.cost(choices)
        for v, choice in enumerate(choices):
            least[v][choice] = min(least[v][choice], cost)
    return least


@pytest.mark.parametrize("block", [1, 5, 1 << 16])
def test_marginals(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtering, "BLOCK", block)
    for seed in range(80):
        graph = random_graph(seed)
        plan = schedule(graph)
        tables = plan.evaluate()
        if plan.optimum(tables) == np.inf:
            continue
        for actual, truth in zip(marginals(plan, tables), by_enumeration(graph), strict=True):
            assert actual == pytest.approx(truth, abs=1e-9)


def test_marginals_of_a_relaxation_bound_and_tightening_raises_the_bound() -> None:
    raised = 0
    for seed in range(12):
        graph = clique(count=6, size=3, seed=seed)
        solver = Minimiser(graph, max_entries=9)
        truth = by_enumeration(graph)
        bounds = []
        for _ in range(6):
            solution = solver.minimise()
            bounds.append(solution.bound)
            least = marginals(solver.plan, solution.tables)
            for copy, origin in enumerate(solver.origins):
                assert (least[copy] <= truth[origin] + 1e-9).all()
            solver.tighten(least, 1.0 / len(solver.origins))
        assert bounds == sorted(bounds)
        raised += bounds[-1] > bounds[0] + 1e-3
    assert raised > 6


def test_restriction_keeps_prices_and_sharing() -> None:
    graph = clique(count=4, size=3, seed=0)
    shared = CostGraph(
        sizes=graph.sizes,
        unary=graph.unary,
        edges=dict.fromkeys(graph.edges, graph.edges[0, 1]),
        memory=graph.memory,
    )
    kept = [np.array([0, 2])] * 4
    small = restrict(shared, kept)
    assert len({id(table) for table in small.edges.values()}) == 1
    assert small.cost((1, 0, 1, 1)) == shared.cost((2, 0, 2, 2))
    assert small.memory_of((1, 0, 1, 1)) == shared.memory_of((2, 0, 2, 2))
