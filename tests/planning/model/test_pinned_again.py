"""A plan that is pinned to its own strategies, storage and schedule is found again at the same
price, under tight memory, too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import load_cluster
from autopar.planning.model.pins import hosted_by
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.sharding.analysis import analyse
from benchmarks.correction import pinned_seconds
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SHAPE = Shape(
    layers=4, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=512, sequence=64, dropout=False
)


@pytest.mark.parametrize(
    ("devices", "stages", "share", "hosted"),
    [(8, 4, 0.7, False), (8, 4, 0.45, True), (6, 2, 0.6, False), (4, 1, 0.6, False)],
)
def test_a_plan_is_found_again(devices: int, stages: int, share: float, hosted: bool) -> None:
    graph = transformer(SHAPE, batch=4).graph
    free = Request(
        cluster=load_cluster("dgx-h100").sized(devices),
        stages=stages,
        micro_batches=1,
        recompute="none",
        memory=1e15,
    )
    request = replace(free, memory=share * search_plan(graph, free).predicted.memory)
    plan = search_plan(graph, request)
    assert (
        plan.predicted.memory <= request.memory_limit
        and plan.provenance.gap is not None
        and plan.provenance.gap >= 0
    )
    assert (hosted_by(plan) is not None) == hosted
    assert pinned_seconds(plan, analyse(graph, train=True), request) == pytest.approx(
        plan.predicted.step, rel=1e-9
    )
