"""The tables' sum of a plan beside the step of its program, which the sum only approximates."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.schemes import scheme_named
from autopar.schemes.pinning import pinned
from autopar.sharding.analysis import analyse
from benchmarks.correction import priced
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SHAPE = Shape(
    layers=4, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=8192, sequence=1024, dropout=False
)
CLUSTER = load_cluster("dgx-h100").sized(4)


CORRECTION = 0.05
"""Share by which a program's step may differ from the tables' sum: buckets, and what exactly hides
under what.
"""


@pytest.mark.parametrize(
    ("scheme", "asked"),
    [
        ("data", {}),
        ("zero1", {}),
        ("zero3", {}),
        ("megatron", {}),
        ("data", {"micro_batches": 4}),
        ("zero3", {"micro_batches": 2}),
        (None, {}),
    ],
)
def test_tables_add_up_to_nearly_the_program(scheme: str | None, asked: dict[str, Any]) -> None:
    graph = transformer(SHAPE, batch=16).graph
    analysis = analyse(graph, train=True)
    request = Request(cluster=CLUSTER, memory=1e15, stages=1, **asked)
    plan = search_plan(
        graph, pinned(request, scheme_named(scheme), analysis) if scheme is not None else request
    )
    tables, program = priced(plan, analysis, request)
    assert program == pytest.approx(plan.predicted.step, rel=1e-9), "one price"
    assert abs(program / tables - 1) < CORRECTION
    assert plan.provenance.gap is not None and plan.provenance.gap >= 0
