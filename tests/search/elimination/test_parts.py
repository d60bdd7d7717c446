"""The parts: joins against broadcasting, pruning keeps an optimum, docstring examples
run.
"""

import doctest
import importlib
from array import array
from dataclasses import replace

import numpy as np
import pytest
from search_graphs import layered_graph, random_graph

from autopar.compiled import eliminate
from autopar.compiled.elimination import recorded
from autopar.search import NoAssignment, solve
from autopar.search.elimination.join import merging
from autopar.search.elimination.order_choice import schedule, typical_schedule
from autopar.search.elimination.orders import order
from autopar.search.elimination.pruning import reduce, substitutes
from autopar.search.elimination.shared_orders import sharing_orders
from autopar.search.memory.mixtures import arrangement, best_cut


@pytest.mark.parametrize(
    "labels",
    [
        ((0,),),
        ((0, 1),),
        ((1, 0), (0, 2)),
        ((1, 0), (0, 2), (0,), (0, 1)),
        ((2, 0, 1), (0, 3)),
        ((1, 0), (2, 0), (0, 3), (0,)),
    ],
)
@pytest.mark.parametrize("sizes", [(3, 4, 2, 5), (1, 1, 1, 1), (6, 1, 7, 2)])
def test_join(labels: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    tables = [draw.random([sizes[label] for label in axes]) for axes in labels]
    rank = max(max(axes) for axes in labels)
    total = np.zeros(sizes[: rank + 1])
    for axes, table in zip(labels, tables, strict=True):
        order = sorted(range(len(axes)), key=axes.__getitem__)
        total = total + table.transpose(order).reshape(
            [sizes[i] if i in axes else 1 for i in range(rank + 1)]
        )
    shape = sizes[1 : rank + 1]
    inputs = [(axes, number) for number, axes in enumerate(labels)]
    program = array("q", recorded(sizes[0], shape, inputs, merging(labels)))
    result = np.empty(shape)
    eliminate([*tables, result], program, len(tables), b"\1")
    assert result == pytest.approx(total.min(axis=0))


def test_pruning_keeps_an_optimum() -> None:
    smaller = 0
    for seed in range(200):
        graph = random_graph(seed)
        try:
            small = reduce(graph)
        except NoAssignment:
            continue
        smaller += sum(small.graph.sizes) < sum(graph.sizes)
        try:
            exact = solve(graph, method="exhaustive")
        except NoAssignment:
            continue
        solution = solve(small.graph, method="exhaustive")
        assert solution.cost == pytest.approx(exact.cost)
        assert graph.cost(small.restore(solution.choices)) == pytest.approx(exact.cost)
    assert smaller > 100


def test_graphs_with_equal_tables_in_the_same_places_share_their_joins() -> None:
    graph = layered_graph(layers=6, operators=3, size=4)
    scaled = replace(
        graph,
        unary=tuple(2.0 * table for table in graph.unary),
        edges={edge: 2.0 * table for edge, table in graph.edges.items()},
    )
    assert scaled.numbers.unary == graph.numbers.unary and scaled.numbers is not graph.numbers
    first, second = (typical_schedule(reduce(one, prune=False).graph) for one in (graph, scaled))
    assert first.of is second.of
    assert second.optimum(second.evaluate()) == 2.0 * first.optimum(first.evaluate())
    other = replace(scaled, unary=(scaled.unary[0] + 1.0, *scaled.unary[1:]))
    assert typical_schedule(reduce(other, prune=False).graph).of is not first.of


def test_dominance() -> None:
    edge = np.array([[0.0, 1.0], [0.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    unary = np.array([1.0, 1.0, 1.0, 1.0])
    assert substitutes(unary, np.zeros(4), [edge]).tolist() == [0, 0, 2, 0]
    assert substitutes(unary, np.array([2.0, 1.0, 0.0, 2.0]), [edge]).tolist() == [0, 1, 2, 0]
    assert substitutes(np.array([np.inf, 1.0, 2.0]), np.zeros(3), []).tolist() == [-1, 1, 1]
    with pytest.raises(NoAssignment):
        substitutes(np.full(2, np.inf), np.zeros(2), [])


def test_reduction_shares_tables() -> None:
    small = reduce(layered_graph(layers=20, operators=4, size=5)).graph
    assert len({id(table) for table in small.edges.values()}) < 30


@pytest.mark.parametrize("module", ["costgraph", "elimination.join", "methods"])
def test_docstring_examples(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"autopar.search.{module}")).attempted > 0
    assert doctest.testmod(importlib.import_module(f"autopar.search.{module}")).failed == 0


def test_one_order_serves_all_sizes() -> None:
    order.cache_clear()
    for size in (3, 5, 8):
        small = reduce(layered_graph(layers=12, operators=5, size=size), prune=False).graph
        assert typical_schedule(small).evaluate()
    assert order.cache_info().misses == 1


def test_an_order_does_not_depend_on_what_was_solved_before() -> None:
    first = layered_graph(layers=9, operators=4, size=6)
    other = layered_graph(layers=9, operators=4, size=3)
    order.cache_clear()
    alone = solve(first)
    order.cache_clear()
    solve(other)
    assert solve(first) == alone


def test_graphs_of_one_search_share_an_order_and_nothing_else() -> None:
    """Within, an order is found once for equal edges, whatever is in the tables; the optima are
    those that each graph has alone.
    """
    first = layered_graph(layers=9, operators=4, size=6)
    other = layered_graph(layers=9, operators=4, size=6, seed=1)
    other = replace(
        other, unary=tuple(table + 0.01 * number for number, table in enumerate(other.unary))
    )
    alone = solve(first).cost, solve(other).cost
    order.cache_clear()
    with sharing_orders():
        assert (solve(first).cost, solve(other).cost) == pytest.approx(alone, rel=1e-12)
    assert order.cache_info().misses == 1
    order.cache_clear()
    solve(first), solve(other)
    assert order.cache_info().misses == 2


def test_tables_without_memory_are_not_computed_again() -> None:
    graph = layered_graph(layers=4, operators=4, size=5)
    plan = schedule(graph)
    assert graph.memory is not None
    free = replace(graph, memory=(*(np.zeros(5) for _ in graph.memory[:-1]), graph.memory[-1]))
    solver = schedule(free)
    known = solver.evaluate()
    again = solver.evaluate(0.5, known)
    assert sum(a is b for a, b in zip(known, again, strict=True)) > len(plan.costs)
    assert solver.optimum(again) == pytest.approx(solver.optimum(solver.evaluate(0.5)))


def test_the_best_cut_is_the_cheapest_of_all_cuts() -> None:
    for seed in range(40):
        graph = random_graph(seed)
        draw = np.random.default_rng(seed)
        first, second = ([int(draw.integers(size)) for size in graph.sizes] for _ in range(2))
        walk = arrangement(graph)
        assert sorted(walk) == list(range(len(graph.sizes)))
        cuts = []
        for cut in range(len(walk) + 1):
            before = set(walk[:cut])
            cuts.append([first[v] if v in before else second[v] for v in range(len(walk))])
        limit = graph.memory_of(cuts[len(cuts) // 2])
        fitting = [graph.cost(choices) for choices in cuts if graph.memory_of(choices) <= limit]
        actual = best_cut(graph, first, second, limit, walk) if walk else []
        if actual is None:
            assert min(fitting) == np.inf
        else:
            assert (
                graph.cost(actual) == pytest.approx(min(fitting))
                and graph.memory_of(actual) <= limit
            )
