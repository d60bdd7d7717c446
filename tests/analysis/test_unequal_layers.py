"""Equal layers that are treated in several ways are told of in a sentence; alike ones are not."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from autopar.analysis.program.unequal_layers import unequal_lines
from autopar.costmodel import load_cluster
from autopar.plan import Plan
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.sharding.analysis import Analysis, analyse
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SHAPE = Shape(
    layers=6, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=512, sequence=64, dropout=False
)


@functools.cache
def planned() -> tuple[Plan, Analysis]:
    graph = transformer(SHAPE, batch=64).graph
    # With ZeRO 2 the first layer's parameters may be stored otherwise, as it is gathered first.
    request = Request(cluster=load_cluster("dgx-h100").sized(4), stages=1, zero=1)
    return search_plan(graph, request), analyse(graph, train=True)


def changed(plan: Plan, **parts: Any) -> Plan:
    """The plan with some strategies, stored parameters or recomputed segments of its own."""
    operators = {
        name: plan.operators[name].model_copy(update={"strategy": ("R",)})
        for name in parts.get("split", ())
    }
    parameters = {
        name: plan.parameters[name].model_copy(update={"storage": "S1"})
        for name in parts.get("stored", ())
    }
    schedule = plan.schedule.model_copy(
        update={"recompute": tuple((name,) for name in parts.get("again", ()))}
    )
    update = {
        "operators": {**plan.operators, **operators},
        "parameters": {**plan.parameters, **parameters},
        "schedule": schedule,
    }
    return plan.model_copy(update=update)


def test_layers_that_are_alike_are_not_told_of() -> None:
    plan, analysis = planned()
    assert unequal_lines(plan, analysis) == []
    assert unequal_lines(changed(plan, split=["layers.0.norm1"]), analysis) == [], (
        "the first layer alone"
    )


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"split": ["layers.2.mlp.up", "layers.3.mlp.up"]},
            ["2 ways (layers 0,1,4,5 | 2,3)", "mlp.up split otherwise"],
        ),
        (
            {"stored": ["layers.5.mlp.up.weight"]},
            ["layers 0..4 | 5", "mlp.up with parameters stored otherwise"],
        ),
        (
            {"again": ["layers.1.mlp.up", "layers.1.norm1"]},
            ["layers 0,2..5 | 1", "norm1, mlp.up recomputed in some only"],
        ),
    ],
)
def test_what_differs_is_said(parts: dict[str, list[str]], words: list[str]) -> None:
    plan, analysis = planned()
    (line,) = unequal_lines(changed(plan, **parts), analysis)
    assert line.startswith("6 equal layers") and all(word in line for word in words), line
