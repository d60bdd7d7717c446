"""Flips: the factor at which the plan changes is bracketed by plans that do and do not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.analysis.searches.sensitivity import CLOSE, STRIDE, Flip, Sensitivity, scaled_links
from autopar.costmodel import load_cluster
from autopar.errors import UsageError
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.schemes import scheme_of
from autopar.sharding.analysis import analyse
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SHAPE = Shape(layers=1, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=2048, sequence=256)


def graph_of(batch: int) -> Graph:
    return transformer(SHAPE, batch=batch).graph


def request(**more: object) -> Request:
    mesh = {"stages": 1, "micro_batches": 1, "fewer": False}
    return Request(cluster=load_cluster("dgx-h100").sized(8), uniform=True, **mesh, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search_plan(graph_of(32), request())


Searched = tuple[Sensitivity, list[Flip], list[tuple[int, int]]]
"""What searches for flips, the flips, and what it told of its progress."""


@pytest.fixture(scope="module")
def searched(plan: Plan) -> Searched:
    sensitivity = Sensitivity(plan, graph_of(32), request(), batch=32, batches=graph_of)
    seen: list[tuple[int, int]] = []
    return sensitivity, sensitivity.flips(lambda done, of, what: seen.append((done, of))), seen


def named(graph: Graph, asked: Request) -> str:
    return scheme_of(search_plan(graph, asked), analyse(graph, train=True)).called


def test_a_flip_is_where_the_name_changes(plan: Plan, searched: Searched) -> None:
    sensitivity, flips, _ = searched
    assert [(f.quantity, f.direction) for f in flips] == [
        (q, d) for q in ("nvlink bandwidth", "memory", "batch") for d in ("down", "up")
    ]
    assert sensitivity.base == scheme_of(plan, analyse(graph_of(32), train=True)).called
    links = [
        flip for flip in flips if flip.quantity == "nvlink bandwidth" and flip.factor is not None
    ]
    assert links
    # The last end that was tried: the strides halved until they are within CLOSE.
    apart = STRIDE ** (0.5 ** math.ceil(math.log2(math.log(STRIDE) / math.log(CLOSE))))
    assert apart <= CLOSE
    for flip in links:
        assert flip.factor is not None
        cluster = request().cluster
        beyond = replace(request(), cluster=scaled_links(cluster, "nvlink", flip.factor))
        before = flip.factor * apart if flip.direction == "down" else flip.factor / apart
        short = replace(request(), cluster=scaled_links(cluster, "nvlink", before))
        assert named(graph_of(32), beyond) == flip.becomes != sensitivity.base
        assert named(graph_of(32), short) == sensitivity.base
        assert flip.value == pytest.approx(flip.factor * cluster.levels[0].bandwidth)


def test_more_memory_than_needed_changes_nothing(searched: Searched) -> None:
    flips = {(f.quantity, f.direction): f for f in searched[1]}
    up = flips["memory", "up"]
    down = flips["memory", "down"]
    assert up.factor is None and up.limit == 64.0 and up.becomes
    assert down.factor is None or down.factor < 1


def test_a_batch_that_the_model_cannot_have_ends_the_search(plan: Plan) -> None:
    def refused(batch: int) -> Graph:
        raise UsageError(f"no batch of {batch}")

    flips = {
        (f.quantity, f.direction): f
        for f in Sensitivity(plan, graph_of(32), request(), batch=32, batches=refused).flips()
    }
    assert flips["batch", "up"].factor is None and flips["batch", "up"].limit == 1.0


def test_flips_are_the_same_whatever_the_processes(
    plan: Plan, searched: Searched, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (1, 3):
        monkeypatch.setattr("autopar.forking.cores", lambda count=count: count)
        sensitivity = Sensitivity(plan, graph_of(32), request(), batch=32, batches=graph_of)
        assert sensitivity.flips() == searched[1]


def test_links_are_scaled_level_by_level() -> None:
    cluster = load_cluster("dgx-h100").sized(32)
    slow = scaled_links(cluster, "nic", 0.5)
    assert [
        new.bandwidth / old.bandwidth for new, old in zip(slow.levels, cluster.levels, strict=True)
    ] == [1.0, 0.5]
    assert scaled_links(slow, "nic", 2.0) == cluster


def test_plans_are_counted_and_bounded(searched: Searched) -> None:
    seen = searched[2]
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1)) and all(
        done <= of for done, of in seen
    )
