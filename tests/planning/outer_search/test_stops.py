"""The stops that users name: a gap that is near enough, and seconds that are over."""

from __future__ import annotations

import math
from typing import Any

import pytest

import autopar
from autopar.costmodel import load_cluster
from autopar.errors import UsageError
from autopar.options.checking import checked
from autopar.planning.model import stops
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.best_first import BestFirst
from autopar.planning.outer_search.evaluator import Evaluator
from autopar.planning.planner import search_plan
from autopar.report.tables import summary_lines
from autopar.search import sharing_orders
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

GRAPH = transformer(
    Shape(
        layers=2, hidden=256, heads=4, kv_heads=4, ffn=512, vocab=1024, sequence=128, dropout=False
    ),
    batch=8,
).graph
FOLDED = FoldedModel(GRAPH, train=True)
CLUSTER = load_cluster("dgx-h100").sized(4)


def looked_at(monkeypatch: pytest.MonkeyPatch, **asked: Any) -> tuple[int, BestFirst]:
    """The solutions that a search plays, and the search."""
    count = 0
    play = Evaluator.play

    def counted(self: Evaluator, *args: Any) -> Any:
        nonlocal count
        count += 1
        return play(self, *args)

    search = BestFirst(FOLDED, Request(cluster=CLUSTER, **asked))
    with monkeypatch.context() as patched, sharing_orders():
        patched.setattr(Evaluator, "play", counted)
        search.run()
    return count, search


def test_a_wide_gap_ends_the_search_early(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them, full = looked_at(monkeypatch)
    few, search = looked_at(monkeypatch, gap=9.0)
    assert few < all_of_them and search.complete
    assert search.incumbents.best <= 10 * search.bound
    assert full.incumbents.best <= search.incumbents.best


def test_the_same_gap_gives_the_same_plan_which_keeps_it() -> None:
    request = Request(cluster=CLUSTER, gap=0.5)
    first, second = (search_plan(GRAPH, request) for _ in range(2))
    assert first.model_dump_json() == second.model_dump_json()
    assert first.provenance.gap is not None and first.provenance.gap <= 0.5
    assert first.provenance.asked_gap == 0.5 and first.provenance.complete
    assert "asked for at most 50.00%" in " ".join(summary_lines(first, ""))


def test_who_asks_for_a_gap_gets_bounds_no_lower() -> None:
    usual = search_plan(GRAPH, Request(cluster=CLUSTER)).provenance
    asked = search_plan(GRAPH, Request(cluster=CLUSTER, gap=0.0)).provenance
    assert usual.gap is not None and asked.gap is not None
    assert asked.gap <= usual.gap + 1e-9
    assert asked.bound_of or asked.gap == 0.0


def test_a_first_plan_is_waited_for_and_says_that_time_was_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock stands still up to the first program."""
    now = 0.0
    play = Evaluator.play

    def late(self: Evaluator, *args: Any) -> Any:
        nonlocal now
        now += 100.0
        return play(self, *args)

    monkeypatch.setattr(stops, "monotonic", lambda: now)
    monkeypatch.setattr(Evaluator, "play", late)
    plan = search_plan(GRAPH, Request(cluster=CLUSTER, seconds=50.0))
    made = plan.provenance
    assert not made.complete and made.asked_seconds == 50.0 and made.gap is not None
    assert "may lead to another plan" in " ".join(summary_lines(plan, ""))
    now = -math.inf
    ample = search_plan(GRAPH, Request(cluster=CLUSTER, seconds=1e6))
    assert ample.provenance.complete
    assert ample.predicted.step <= plan.predicted.step


def test_no_clock_is_read_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> float:
        raise AssertionError

    monkeypatch.setattr(stops, "monotonic", refused)
    assert search_plan(GRAPH, Request(cluster=CLUSTER)).provenance.complete


@pytest.mark.parametrize("wrong", [{"gap": -0.1}, {"gap": math.inf}, {"seconds": 0.0}])
def test_impossible_stops_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must"):
        Request(cluster=CLUSTER, **wrong)


def test_gaps_are_read_as_shares() -> None:
    assert checked({"gap": "5%"}) == {"gap": 0.05} == checked({"gap": "0.05"})
    assert checked({"seconds": "2.5"}) == {"seconds": 2.5} and checked({"gap": None}) == {
        "gap": None
    }
    with pytest.raises(UsageError, match="a share such as 5%"):
        checked({"gap": "wide"})
    with pytest.raises(UsageError, match="number of seconds"):
        checked({"seconds": "soon"})


def test_python_takes_both(tmp_path: Any) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    plan = autopar.plan(
        model, (torch.zeros(16, 64),), devices=2, cluster="dgx-h100", gap="50%", seconds=600
    )
    assert plan.provenance.asked_gap == 0.5 and plan.provenance.asked_seconds == 600
