"""Messages between stages as a framework sends them: in shares, and under computation or not."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.api import plan_loaded
from autopar.costmodel import load_cluster
from autopar.costmodel.frameworks import AUTOPAR
from autopar.model import LoadedModel
from autopar.plan import Plan
from benchmarks.validating.known import Shape
from benchmarks.validating.known.transformer import transformer

CLUSTER = load_cluster("g5").sized(4)
SHAPE = Shape(
    layers=4, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=4096, sequence=1024, dropout=False
)


def staged(**habits: Any) -> Plan:
    """Two stages of two tensor-parallel devices whose rows between products are whole."""
    graph = transformer(SHAPE, batch=8).graph
    framework = AUTOPAR.but(**habits)
    return plan_loaded(
        LoadedModel(graph=graph, source=graph, dtype="bfloat16"),
        cluster=CLUSTER.run_by(framework),
        scheme="pipeline-1f1b 2 x megatron 2",
        stages=2,
        micro_batches=4,
    ).plan


@pytest.fixture(scope="module")
def whole() -> Plan:
    return staged()


def test_a_stage_sends_a_share_from_each_device(whole: Plan) -> None:
    shared = staged(scatter_sends=True)
    assert shared.stages[0].handed == whole.stages[0].handed / 2
    assert shared.stages[0].send < whole.stages[0].send


def test_a_stage_waits_for_messages_that_do_not_overlap(whole: Plan) -> None:
    waiting = staged(overlap_sends=False)
    assert waiting.stages[0].send == whole.stages[0].send
    assert waiting.predicted.step > whole.predicted.step + whole.stages[0].send
