"""Merged passes are a choice of the search: taken where exchanges of experts take long."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.planning.model.pins import Pins
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
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


def _request() -> Request:
    wanted = request(NODES, train=True)
    assert wanted.mesh is not None
    axes = {axis.name: "e+t" for axis in wanted.mesh.axes}
    return replace(wanted, stages=1, limits=Pins(operators={"*experts/experts": axes}))


def _plan(**options: bool | int) -> Plan:
    return search_plan(_graph(), replace(_request(), **options))


def test_they_are_taken_where_they_are_faster() -> None:
    free = _plan()
    off = _plan(overlap_experts=False)
    assert free.schedule.overlap_experts and not off.schedule.overlap_experts
    assert free.predicted.step < 0.97 * off.predicted.step
    on = _plan(overlap_experts=True, micro_batches=free.schedule.micro_batches)
    assert on.schedule.overlap_experts
    assert on.predicted.step == pytest.approx(free.predicted.step, rel=0.01)


def test_they_need_passes_to_merge() -> None:
    with pytest.raises(UsageError, match="--micro-batches"):
        _plan(overlap_experts=True)
