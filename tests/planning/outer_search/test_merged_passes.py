"""Merged passes are a choice of the search: taken where exchanges of experts take long."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from autopar.errors import PlanError, UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.planning.model.pins import Pins
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.sharding.analysis import Analysis, analyse
from tests.end_to_end.plans import request

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.ci]
NODES = (2, 8)


@functools.cache
def _graph() -> Graph:
    """Two layers of a Mixtral, without weights."""
    config = transformers.MixtralConfig(
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_local_experts=16,
        num_experts_per_tok=4,
        vocab_size=1024,
    )
    with torch.device("meta"):
        model = transformers.MixtralModel(config)
        model.set_experts_implementation("grouped_mm")
        tokens = torch.zeros(64, 1024, dtype=torch.int64)
    return load_model(
        model, ModelOptions(train=True, dtype="bfloat16"), {"input_ids": tokens, "use_cache": False}
    ).graph


@functools.cache
def _analysis() -> Analysis:
    return analyse(_graph(), train=True)


def _request(stages: int) -> Request:
    wanted = request(NODES, train=True, stages=stages)
    assert wanted.mesh is not None
    axes = {axis.name: "e+t" for axis in wanted.mesh.axes}
    return replace(wanted, limits=Pins(operators={"*experts/experts": axes}))


def _plan(stages: int = 1, **options: bool | int | str) -> Plan:
    return search_plan(_graph(), replace(_request(stages), **options))


def test_they_are_taken_where_they_are_faster() -> None:
    free = _plan()
    off = _plan(overlap_experts=False)
    assert free.schedule.overlap_experts and not off.schedule.overlap_experts
    assert free.predicted.step < 0.97 * off.predicted.step
    on = _plan(overlap_experts=True, micro_batches=free.schedule.micro_batches)
    assert on.schedule.overlap_experts
    assert on.predicted.step == pytest.approx(free.predicted.step, rel=0.01)


def test_stages_merge_them_where_that_is_faster() -> None:
    free, off, on = (
        _plan(stages=2, micro_batches=8, interleave=1, overlap_experts=merged)
        for merged in (None, False, True)
    )
    assert free.schedule.pipeline == on.schedule.pipeline == "merged_1f1b"
    assert free.schedule.overlap_experts and on.schedule.overlap_experts
    assert off.schedule.pipeline != "merged_1f1b" and not off.schedule.overlap_experts
    assert free.predicted.step == pytest.approx(on.predicted.step, rel=0.01)
    assert free.predicted.step < 0.97 * off.predicted.step
    # Its parts are those of the step, with what hides in the pairs.
    parts = free.predicted
    assert parts.step == pytest.approx(
        parts.forward
        + parts.backward
        + parts.update
        + parts.communication
        - parts.overlapped
        + parts.bubble
    )
    assert all(0 < s.hidden < s.forward + s.backward for s in free.stages)
    assert free.predicted.memory > off.predicted.memory
    # What a plan says of its passes and the order of its stages have to agree.
    for plan, other in ((free, "1f1b"), (off, "merged_1f1b")):
        schedule = plan.schedule.model_copy(update={"pipeline": other})
        with pytest.raises(PlanError, match="under merged_1f1b alone"):
            plan.model_copy(update={"schedule": schedule}).execution(_analysis())


def test_what_does_not_fit_merges_nothing() -> None:
    """Within the memory of the merged plan less a tenth, another is found."""
    free = _plan(stages=2, micro_batches=8, interleave=1)
    tight = _plan(stages=2, micro_batches=8, interleave=1, memory=0.6 * free.predicted.memory)
    assert tight.predicted.memory <= 0.6 * free.predicted.memory
    assert tight.predicted.step > free.predicted.step


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "--micro-batches"),
        ({"micro_batches": 1}, "--micro-batches"),
        ({"stages": 2, "micro_batches": 4, "schedule": "1f1b"}, "under merged_1f1b alone"),
    ],
)
def test_they_need_passes_to_merge(options: dict[str, bool | int | str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _plan(**{"overlap_experts": True} | options)


def test_a_schedule_that_merges_is_not_without_merged_passes() -> None:
    with pytest.raises(UsageError, match="merged_1f1b with --overlap-experts off"):
        _plan(stages=2, schedule="merged_1f1b", overlap_experts=False)
