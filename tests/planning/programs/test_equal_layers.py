"""Equal layers are alike, unless pins or stages on meshes of their own keep them apart."""

from __future__ import annotations

import functools

from autopar.analysis.program.unequal_layers import unequal_lines
from autopar.costmodel import load_cluster
from autopar.ir import Graph
from autopar.planning.model.pins import Pins
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.schemes.pinning import stage_mesh
from autopar.sharding.analysis import analyse
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

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


@functools.cache
def llama(batch: int) -> Graph:
    return transformer(LLAMA, batch=batch).graph


def test_nothing_is_said_where_layers_are_alike() -> None:
    plan = search_plan(llama(8), Request(cluster=CLUSTER))
    assert unequal_lines(plan, analyse(llama(8), train=True)) == []


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
