"""Processes that work ahead of a search: the plan is the same whatever their number and fate."""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.errors import NoPlanFits
from autopar.ir import Graph
from autopar.planning.model.figures import Figures
from autopar.planning.model.request import Request
from autopar.planning.outer_search import ahead, best_first
from autopar.planning.outer_search.ahead import Ahead
from autopar.planning.outer_search.questions import Question
from autopar.planning.planner import search_plan
from autopar.search import Rest, sharing, sharing_orders

SHAPE = Shape(
    layers=2, hidden=2048, heads=16, kv_heads=16, ffn=8192, vocab=8192, sequence=1024, dropout=False
)
GRAPH = transformer(SHAPE, batch=16).graph
EXPERTS = transformer(replace(SHAPE, experts=8, top_k=2, ffn=1024), batch=16).graph
CLUSTER = load_cluster("dgx-h100").sized(8)
PLAIN = Request(cluster=CLUSTER, zero=1, recompute="none")
CASES = {
    "one stage": (GRAPH, replace(PLAIN, stages=1)),
    "plain": (GRAPH, PLAIN),
    "memory": (GRAPH, replace(PLAIN, memory=0.6e9, zero=None, recompute=None)),
    "experts": (EXPERTS, replace(PLAIN, cluster=CLUSTER.sized(4))),
    "gap": (GRAPH, replace(PLAIN, gap=0.1)),
    "other method": (GRAPH, replace(PLAIN, search="recursive_programming")),
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork at the first node of each search."""
    monkeypatch.setattr(ahead, "LONG", -1.0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The keys of all figures that a search took over from others, and used."""
    keys: list[object] = []
    known = Figures.known

    def noted(self: Figures, key: object, kind: Any = None) -> Any:
        told = key in self._told and key not in self._own
        value = known(self, key, kind)
        if told and value is not None:
            keys.append(key)
        return value

    def waiting(self: Ahead, question: Question) -> None:
        # Also for what nobody has begun: how fast the others are must not decide what is tested.
        while (
            question in self._asked and self._asked[question][1] in self._asked[question][0].before
        ):
            self._receive(self._asked[question][0])

    monkeypatch.setattr(Figures, "known", noted)
    monkeypatch.setattr(Ahead, "wait", waiting)
    return keys


@functools.cache
def alone(case: str) -> str:
    """The plan of one process."""
    return planned(*CASES[case], 1)


def planned(graph: Graph, request: Request, jobs: int) -> str:
    try:
        return search_plan(graph, request, jobs=jobs).to_json()
    except NoPlanFits as error:
        return str(error)


@pytest.mark.parametrize(
    "case", ["one stage", *(pytest.param(case, marks=pytest.mark.slow) for case in [*CASES][1:])]
)
def test_the_plan_is_the_same_with_any_number_of_processes(case: str, taken: list[object]) -> None:
    expected = alone(case)
    assert not taken
    for jobs in (2, 3):
        taken.clear()
        assert planned(*CASES[case], jobs) == expected
        assert taken
    assert multiprocessing.active_children() == []


def test_processes_that_are_ended_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    ask = Ahead.ask

    def ending(self: Ahead, question: Question) -> None:
        nonlocal asked
        asked += 1
        if asked == 5:
            for other in self.others:
                assert other.process.process.pid is not None
                os.kill(other.process.process.pid, signal.SIGKILL)
        ask(self, question)

    monkeypatch.setattr(Ahead, "ask", ending)
    assert planned(*CASES["one stage"], 3) == alone("one stage")
    assert asked >= 5


def test_no_room_for_a_process_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(ahead, "Forked", refused)
    assert planned(*CASES["one stage"], 2) == alone("one stage")


def test_a_short_search_forks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LONG", math.inf)
    monkeypatch.setattr(ahead, "Forked", None)
    assert planned(*CASES["one stage"], 4) == alone("one stage")


@pytest.mark.parametrize("when", ["before a plan", "after one"])
def test_an_interrupt_ends_them_all(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an incumbent a solution that waits in the queue is played."""
    wait = Ahead.wait
    search: list[best_first.BestFirst] = []
    run = best_first.BestFirst.run

    def running(self: best_first.BestFirst, *args: Any) -> None:
        search.append(self)
        run(self, *args)

    def interrupted(self: Ahead, question: Question) -> None:
        queue = search[0].queue
        solved = any(isinstance(node, best_first.Solved) for _, node in queue.first(len(queue)))
        ready = bool(search[0].incumbents) if when == "after one" else solved
        if ready and self.others:
            monkeypatch.setattr(Ahead, "wait", wait)
            raise KeyboardInterrupt
        wait(self, question)

    monkeypatch.setattr(best_first.BestFirst, "run", running)
    monkeypatch.setattr(Ahead, "wait", interrupted)
    plan = search_plan(*CASES["one stage"], jobs=2)
    assert not plan.provenance.complete
    assert multiprocessing.active_children() == []


def test_a_figure_is_taken_where_the_same_orders_hold() -> None:
    with sharing_orders():
        shared = sharing()
        assert shared is not None
        shared.put("order", 1)
        figures = Figures()
        figures.take([("good", 2, Rest(entries={0})), ("bad", 3, Rest(entries={1}))])
        assert figures.once("good", lambda: 0) == 2
        assert figures.once("bad", lambda: 0) == 0
        figures.take([("late", 4, Rest(entries={0}))])
        shared.put("order", 5)
        assert figures.once("late", lambda: 6) == 6


def test_figures_are_told_with_what_they_rest_on() -> None:
    with sharing_orders():
        shared = sharing()
        assert shared is not None
        shared.put("order", 1)
        figures = Figures()
        figures.once("known to all", lambda: 0)
        figures.begin_telling()
        figures.once("inner", lambda: shared.by("order", int))
        figures.once("outer", lambda: figures.once("inner", int))
        figures.once("own", lambda: shared.put("another", 2))
        told = figures.tell()
        assert [(key, value, rest.entries) for key, value, rest in told] == [
            ("inner", 1, {0}),
            ("outer", 1, {0}),
        ]
        assert figures.tell() == []
