"""The name of a plan whose first and last stage share a parameter and lie on unlike meshes."""

from __future__ import annotations

import pytest

from autopar.costmodel import load_cluster
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.schemes import scheme_of
from autopar.sharding.analysis import analyse
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

GPT2 = Shape(
    layers=12,
    hidden=768,
    heads=12,
    kv_heads=12,
    ffn=3072,
    vocab=50257,
    sequence=1024,
    dropout=False,
)


@pytest.mark.slow
def test_a_tied_parameter_has_the_axes_of_its_first_stage() -> None:
    graph = transformer(GPT2, batch=32).graph
    plan = search_plan(
        graph,
        Request(cluster=load_cluster("dgx-h100").sized(5), memory=1e15, stages=2, schedule="1f1b"),
    )
    assert len({stage.mesh for stage in plan.stages}) > 1, "stages on unlike meshes"
    assert "one device | data 4" in scheme_of(plan, analyse(graph, train=True)).name
