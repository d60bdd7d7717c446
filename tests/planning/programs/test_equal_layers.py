"""Equal layers are alike unless a difference pays, and then the plan says what it pays; on stages,
and where nothing binds, too.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from autopar.analysis.program.unequal_layers import unequal_lines
from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.planning.model.effort import EFFORT
from autopar.planning.model.pins import Pins
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.planning.programs import equal_layers as alike
from autopar.schemes.pinning import stage_mesh
from autopar.sharding.analysis import analyse

LLAMA = Shape(
    layers=8,
    hidden=1024,
    heads=8,
    kv_heads=4,
    ffn=2816,
    vocab=8192,
    sequence=512,
    gated=True,
    tied=False,
    bias=False,
    dropout=False,
    norm="rms_norm",
    position="rotary",
)
CLUSTER = load_cluster("dgx-h100").sized(8)
ALONE = {"stages": 1, "micro_batches": 1, "mesh": stage_mesh(CLUSTER, (2, 4))}


@functools.cache
def llama(batch: int) -> Graph:
    return transformer(LLAMA, batch=batch).graph


def planned(batch: int, share: float, **asked: Any) -> tuple[Plan, Request]:
    """A plan with that share of the memory that the plan without a limit needs, and its request."""
    free = Request(cluster=CLUSTER, recompute="none", memory=1e15, **asked)
    limited = replace(free, memory=share * search_plan(llama(batch), free).predicted.memory)
    return search_plan(llama(batch), limited), limited


@pytest.mark.parametrize(
    ("batch", "share", "asked"),
    [(8, 0.6, {**ALONE, "zero": 1}), (32, 0.65, {"stages": 4, "micro_batches": 2, "zero": 1})],
)
def test_a_mixture_stays_only_where_it_pays(
    batch: int, share: float, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, request = planned(batch, share, **asked)
    lines = unequal_lines(plan, analyse(llama(batch), train=True))
    assert plan.mixtures and plan.predicted.memory <= request.memory_limit
    for mixture, line in zip(plan.mixtures, lines, strict=True):
        assert mixture.layers == 8 and mixture.alike is not None
        assert mixture.alike > (1 + EFFORT.rounding) * plan.predicted.step
        assert mixture.needed == 0 or mixture.needed > request.memory_limit
        assert (
            "8 equal layers" in line
            and f"{mixture.alike / plan.predicted.step - 1:.1%}) longer" in line
        )
    slowest = max(mixture.alike or 0.0 for mixture in plan.mixtures)
    monkeypatch.setattr(
        alike, "EFFORT", replace(EFFORT, rounding=1.01 * slowest / plan.predicted.step - 1)
    )
    even = search_plan(llama(batch), request)
    assert even.mixtures == () and unequal_lines(even, analyse(llama(batch), train=True)) == []
    assert (
        plan.predicted.step < even.predicted.step <= 1.01 * slowest
        and even.predicted.memory <= request.memory_limit
    )


def test_nothing_is_said_where_layers_are_alike() -> None:
    plan = search_plan(llama(8), Request(cluster=CLUSTER))
    assert plan.mixtures == () and unequal_lines(plan, analyse(llama(8), train=True)) == []


def test_a_difference_that_is_pinned_stays() -> None:
    cluster = CLUSTER.sized(4)
    pins = Pins(operators={"layers.3.mlp.up": {"gpu": "R"}})
    request = Request(
        cluster=cluster, stages=1, micro_batches=1, mesh=stage_mesh(cluster, (4,)), limits=pins
    )
    plan = search_plan(llama(8), request)
    assert plan.operators["layers.3.mlp.up"].strategy == ("R",) and plan.operators[
        "layers.4.mlp.up"
    ].strategy != ("R",)


def test_stages_on_meshes_of_their_own_are_said_to_be() -> None:
    request = Request(
        cluster=load_cluster("rtx4090").sized(6),
        stages=2,
        micro_batches=8,
        recompute="none",
        zero=1,
    )
    plan = search_plan(llama(16), request)
    (line,) = unequal_lines(plan, analyse(llama(16), train=True))
    assert "they lie on stages of other meshes" in line
