"""An interrupted search leaves its best assignment with a bound; the interrupts come at counted
places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from certificate import check
from certifying import certify
from search_graphs import clique, layered_graph

from autopar.search import CostGraph, Interrupted, dynamic_programming, solve
from autopar.search.elimination.schedules import Schedule
from autopar.search.solvers import interruption
from autopar.search.solvers.dynamic_programming import eliminate_variables
from autopar.search.solvers.interruption import Incumbent

LAYERS = layered_graph(layers=6, operators=4, size=5, hub=3)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Ctrl-C at the start of the elimination of that number; later ones run."""
    seen = [0]
    evaluate = Schedule.evaluate

    def counted(self: Schedule, *arguments: Any, **named: Any) -> Any:
        seen[0] += 1
        if seen[0] == count:
            raise KeyboardInterrupt
        return evaluate(self, *arguments, **named)

    monkeypatch.setattr(Schedule, "evaluate", counted)
    return seen


@pytest.mark.parametrize("count", range(1, 8))
def test_with_a_memory_limit(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 0.8 * solve(LAYERS).memory
    truth = solve(LAYERS, memory_limit=limit)
    interrupt_at(monkeypatch, count)
    with pytest.raises(Interrupted) as caught:
        solve(LAYERS, memory_limit=limit)
    best = caught.value.best
    assert best is not None and best.memory <= limit
    assert best.lower_bound <= truth.cost * (1 + 1e-12) and truth.lower_bound <= best.cost * (
        1 + 1e-12
    )
    assert best.cost == LAYERS.cost(best.choices)
    monkeypatch.undo()
    assert check(LAYERS, certify(LAYERS, best)).valid


def test_before_anything_is_known_the_fast_search_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 1)
    with pytest.raises(Interrupted, match="gap") as caught:
        solve(LAYERS)
    best = caught.value.best
    assert best is not None and best.cost >= best.lower_bound
    assert isinstance(caught.value, KeyboardInterrupt)


def test_nothing_is_known_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 1)
    with pytest.raises(Interrupted) as caught:
        solve(LAYERS, memory_limit=0.0)
    assert caught.value.best is None


@pytest.mark.parametrize("count", [2, 4, 6, 8])
def test_of_a_graph_that_is_too_wide(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dynamic_programming.__globals__, "EXACT_WORK", 0.0)
    graph = clique(count=8, size=3, seed=1)
    truth = solve(graph, method="exhaustive")
    interrupt_at(monkeypatch, count)
    with pytest.raises(Interrupted) as caught:
        eliminate_variables(graph, memory_limit=None, max_entries=27)
    best = caught.value.best
    assert best is not None and best.lower_bound <= truth.cost <= best.cost


def test_an_interrupt_of_the_rescue_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Schedule, "evaluate", stop)
    monkeypatch.setattr(interruption, "recursive_programming", stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        solve(CostGraph(sizes=(2, 2), unary=(np.zeros(2),) * 2, edges={(0, 1): np.eye(2)}))
    assert not isinstance(caught.value, Interrupted)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_gap_is_a_share_of_the_cost(scale: float) -> None:
    """By it a search decides whether it is done: seconds or milliseconds, it is the same."""
    actual = Incumbent(
        CostGraph(sizes=(2,), unary=(scale * np.array([4.0, 5.0]),), edges={}), None, "none"
    )
    assert actual.gap == np.inf
    actual.offer([1])
    actual.prove(4.0 * scale, "messages")
    assert actual.gap == pytest.approx(0.2)
    actual.offer([0])
    assert actual.gap == 0.0
