"""The parts of a gap: their sum, and what closes each of them."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest

from autopar.analysis.searches.gap_parts import (
    CANDIDATE,
    EXCHANGES,
    MEMORY,
    PROGRAM,
    GapParts,
    gap_parts,
)
from autopar.costmodel import load_cluster
from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.report.explain.explanation import Explained
from autopar.report.explain.gap import MEANINGS, gap_json, gap_parts_told
from autopar.report.printing import Table
from autopar.sharding.analysis import analyse
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

CLUSTER = load_cluster("dgx-h100").sized(4)
GRAPH = transformer(
    Shape(
        layers=2, hidden=256, heads=4, kv_heads=4, ffn=512, vocab=8192, sequence=128, dropout=False
    ),
    batch=16,
).graph
ANALYSIS = analyse(GRAPH, train=True)


@functools.cache
def planned(stages: int) -> Plan:
    return search_plan(GRAPH, Request(cluster=CLUSTER, stages=stages, fewer=False))


def parts_of(plan: Plan) -> GapParts:
    return gap_parts(plan, ANALYSIS, CLUSTER)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_parts_add_up_to_the_gap(stages: int) -> None:
    plan = planned(stages)
    parts = parts_of(plan)
    assert math.fsum(parts.seconds.values()) == pytest.approx(
        plan.predicted.step - plan.provenance.lower_bound, abs=1e-12
    )
    assert all(seconds >= 0 for seconds in parts.seconds.values())
    assert list(parts.seconds) == [part for part in MEANINGS if part in parts.seconds]
    assert ("passes" in parts.seconds) == (stages > 1)


def test_exchanges_that_may_hide_are_a_part_of_their_own() -> None:
    shape = Shape(
        layers=2,
        hidden=256,
        heads=4,
        kv_heads=4,
        ffn=512,
        vocab=8192,
        sequence=256,
        experts=4,
        top_k=2,
        expert_ffn=4096,
        dropout=False,
    )
    graph = transformer(shape, batch=16).graph
    plan = search_plan(graph, Request(cluster=CLUSTER, stages=1, micro_batches=2, fewer=False))
    parts = gap_parts(plan, analyse(graph, train=True), CLUSTER)
    assert list(parts.seconds) == [part for part in MEANINGS if part in parts.seconds]
    assert EXCHANGES in parts.seconds and EXCHANGES not in parts_of(planned(1)).seconds
    assert math.fsum(parts.seconds.values()) == pytest.approx(
        plan.predicted.step - plan.provenance.lower_bound, abs=1e-12
    )


def test_a_lower_bound_of_another_candidate_is_its_part() -> None:
    plan = planned(1)
    bound = 0.5 * plan.predicted.step
    made = plan.provenance.model_copy(update={"lower_bound": bound, "bound_of": "gpu=2"})
    parts = parts_of(plan.model_copy(update={"provenance": made}))
    assert parts.seconds[CANDIDATE] > 0.4 * plan.predicted.step and parts.held_by == "gpu=2"
    assert parts.seconds[CANDIDATE] == max(parts.seconds.values())


def test_a_slower_program_has_its_own_part() -> None:
    plan = planned(1)
    slower = plan.predicted.model_copy(update={"step": 2 * plan.predicted.step})
    before = parts_of(plan).seconds[PROGRAM]
    after = parts_of(plan.model_copy(update={"predicted": slower})).seconds[PROGRAM]
    assert after - before == pytest.approx(plan.predicted.step, rel=1e-2)


def test_memory_that_binds_is_seen_where_the_bound_leaves_it_out() -> None:
    shape = Shape(
        layers=2, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=4096, sequence=256, dropout=False
    )
    graph = transformer(shape, batch=16).graph
    request = Request(
        cluster=CLUSTER, stages=1, micro_batches=4, recompute="none", offload="none", fewer=False
    )
    free = search_plan(graph, request)
    limit = 0.7 * free.predicted.memory
    plan = search_plan(graph, replace(request, memory=limit))
    made = plan.provenance.model_copy(update={"lower_bound": free.provenance.lower_bound})
    without = plan.model_copy(update={"provenance": made})
    analysis = analyse(graph, train=True)
    ample, tight = (
        gap_parts(without, analysis, CLUSTER, memory=memory).seconds[MEMORY]
        for memory in (None, limit)
    )
    assert tight > 0.02 * plan.predicted.step and ample < 1e-9


def test_the_parts_are_told() -> None:
    parts = parts_of(planned(2))
    sentence, table = gap_parts_told(parts)
    assert isinstance(sentence, str) and "no plan takes less than" in sentence
    assert isinstance(table, Table) and table.rows[-1][0] == "together"
    assert gap_json(parts)["seconds"] == parts.seconds


def test_explanations_have_the_parts_of_whole_plans_alone() -> None:
    plan = planned(1)
    explained = Explained.of_model(plan, GRAPH, CLUSTER, None).with_gap(None)
    assert explained.json()["gap"] == gap_json(parts_of(plan))
    titles = [part.title for part in explained.parts() if isinstance(part, Table)]
    assert titles == ["What the bound leaves out, one after the other, at the plan's own candidate"]
    one = Explained.of_model(plan, GRAPH, CLUSTER, next(iter(plan.operators)))
    with pytest.raises(UsageError, match="leave out OP"):
        one.with_gap(None)
