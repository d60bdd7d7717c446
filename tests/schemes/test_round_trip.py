"""A pinned scheme is named the same in the plan that comes of it, on small graphs like GPT, Llama
and a mixture of experts.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from autopar.costmodel import load_cluster
from autopar.plan import Plan
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.schemes import Named, scheme_named, scheme_of
from autopar.schemes.pinning import pinned
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import Kind, parse_layout
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

GPT = Shape(layers=2, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=1024, sequence=256)
LLAMA = Shape(
    layers=2,
    hidden=512,
    heads=8,
    kv_heads=4,
    ffn=1536,
    vocab=1024,
    sequence=256,
    gated=True,
    bias=False,
    dropout=False,
    norm="rms_norm",
    position="rotary",
    tied=False,
)
EXPERTS = Shape(
    layers=2,
    hidden=512,
    heads=8,
    kv_heads=8,
    ffn=1024,
    vocab=1024,
    sequence=256,
    gated=True,
    bias=False,
    dropout=False,
    norm="rms_norm",
    position="rotary",
    tied=False,
    experts=8,
)
SHAPES = {"gpt": GPT, "llama": LLAMA, "experts": EXPERTS}
DEVICES = {"2d": 4, "2.5d": 8, "3d": 8, "pipeline-gpipe": 2, "pipeline-1f1b": 2}


@functools.cache
def analysed(shape: str) -> Analysis:
    return analyse(transformer(SHAPES[shape], batch=32).graph, train=True)


def planned(shape: str, scheme: str, devices: int, **pins: int) -> tuple[Plan, Named]:
    free = Request(cluster=load_cluster("dgx-h100").sized(devices), uniform=True, **pins)  # type: ignore[arg-type]
    plan = search_plan(analysed(shape).graph, pinned(free, scheme_named(scheme), analysed(shape)))
    return plan, scheme_of(plan, analysed(shape))


SAME = (
    "data",
    "zero1",
    "zero2",
    "zero3",
    "megatron",
    "megatron-sp",
    "ulysses",
    "context",
    "2d",
    "2.5d",
    "3d",
    "pipeline-gpipe",
    "pipeline-1f1b",
)


@pytest.mark.parametrize(
    "shape, scheme",
    [("gpt", s) for s in SAME]
    + [("llama", s) for s in SAME]
    + [("experts", s) for s in (*SAME[:6], "expert")],
)
def test_a_pinned_scheme_is_named_the_same(shape: str, scheme: str) -> None:
    plan, named = planned(shape, scheme, DEVICES.get(scheme, 4))
    assert named.name == scheme and named.has(scheme)
    assert plan.devices == DEVICES.get(scheme, 4)
    assert scheme_of(Plan.model_validate_json(plan.to_json()), analysed(shape)) == named


@pytest.mark.parametrize(
    "scheme, devices",
    [
        ("data 2 (zero1) x megatron-sp 4", 8),
        ("data 2 (zero3) x megatron 2", 4),
        ("pipeline-1f1b 2 x data 2 (zero2) x megatron-sp 2", 8),
        ("pipeline-gpipe 2 x megatron 4", 8),
        ("data 2 x ulysses 4", 8),
        ("data 2 x context 2", 4),
    ],
)
def test_products_are_read_as_they_are_named(scheme: str, devices: int) -> None:
    assert planned("gpt", scheme, devices)[1].name == scheme


@pytest.mark.parametrize(
    "rest",
    [pytest.param(r, marks=pytest.mark.slow) for r in ("megatron", "ulysses", "context")]
    + ["megatron-sp"],
)
def test_experts_lie_over_data_and_what_else_splits_the_rest(rest: str) -> None:
    """Folding: whole experts on devices that split heads, or the sequence, outside of them."""
    plan, named = planned("experts", f"expert 2 x expert+{rest} 2", 4)
    assert named.name == f"expert 2 x expert+{rest} 2"
    layers = {op.strategy for name, op in plan.operators.items() if name.endswith(".experts")}
    assert layers == {("e+t", "e+t")}


@pytest.mark.parametrize(
    "layers, batch, counts", [(2, 8, {1, 2}), (2, 12, {1, 3}), (4, 16, {1, 2, 4})]
)
def test_micro_batches_that_the_scheme_forbids_are_passed_over(
    layers: int, batch: int, counts: set[int]
) -> None:
    """Four devices split 8 samples into two micro-batches and 12 into three: a number that cannot
    be split says nothing of the others.
    """
    analysis = analyse(transformer(replace(GPT, layers=layers), batch=batch).graph, train=True)
    scheme = "pipeline-1f1b 2 x data 4"
    free = Request(cluster=load_cluster("dgx-h100").sized(8), uniform=True)
    plan = search_plan(analysis.graph, pinned(free, scheme_named(scheme), analysis))
    assert scheme_of(plan, analysis).name == scheme and plan.schedule.micro_batches in counts


@pytest.mark.parametrize(
    "name, scheme",
    [
        ("mixed", None),
        ("one device", None),
        ("data 2 x mixed 2", None),
        ("pipeline-zero_bubble",) * 2,
    ],
)
def test_a_name_is_a_scheme_only_where_it_can_be_asked_for(name: str, scheme: str | None) -> None:
    named = Named(name=name, axes={}, factors=(), sentence="")
    assert named.scheme == scheme and (named.called == name) is (scheme is not None)
    assert scheme is None or scheme_named(scheme).name == scheme


def test_a_product_with_experts() -> None:
    _, named = planned("experts", "data 2 x expert 4", 8)
    assert named.name == "data 2 x expert 4" and named.axes == {"gpu0": "data", "gpu1": "expert"}


@pytest.mark.parametrize("text", ["gpt3-2x2x2", "2x2x2", "p2d2t2"])
def test_the_triple_is_pipeline_data_tensor(text: str) -> None:
    plan, named = planned("gpt", text, 8)
    assert named.name == "pipeline-1f1b 2 x data 2 x megatron 2"
    assert [factor.size for factor in named.factors] == [2, 2, 2] and len(plan.stages) == 2


def test_tensor_is_one_of_the_tensor_schemes() -> None:
    assert planned("gpt", "tensor", 4)[1].name in (
        "megatron",
        "megatron-sp",
        "columns",
        "hidden",
        "tensor",
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_decides_how_data_parallelism_stores(zero: int) -> None:
    plan, named = planned("gpt", "data", 4, zero=zero, micro_batches=4)
    assert named.name == ("data", "zero1", "zero2", "zero3")[zero]
    stored = [
        (len(p.shape), any(one.kind is Kind.SPLIT for one in parse_layout(p.storage)))
        for p in plan.parameters.values()
    ]
    assert (
        all(split for dims, split in stored if dims > 1)
        if zero
        else not any(split for _, split in stored)
    )


def test_schemes_differ_where_their_names_do() -> None:
    """The differences that give schemes their names are seen in the plans themselves."""
    ulysses, sp, whole = (
        planned("gpt", scheme, 4)[0] for scheme in ("ulysses", "megatron-sp", "megatron")
    )
    assert ("forward", "all_to_all") in {(c.phase, c.kind) for c in ulysses.collectives}
    assert {p.storage for p in ulysses.parameters.values()} == {"R"}
    assert (
        ulysses.operators["layers.0.attention.core"].strategy
        == sp.operators["layers.0.attention.core"].strategy
        == ("g",)
    )
    assert (
        ulysses.operators["layers.1.norm1"].strategy,
        sp.operators["layers.1.norm1"].strategy,
    ) == (("d1",), ("d1",))
    assert whole.operators["layers.1.norm1"].strategy in (("R",), ("B",))
    assert [plan.operators["layers.1.mlp.up"].strategy for plan in (ulysses, sp, whole)] == [
        ("d1",),
        ("n",),
        ("n",),
    ]
    grid = planned("gpt", "3d", 8)[0]
    assert sorted(grid.operators["layers.1.mlp.up"].strategy) == sorted(("d0", "k", "n"))


def test_a_plan_on_one_device_has_no_scheme() -> None:
    plan = search_plan(
        analysed("gpt").graph, Request(cluster=load_cluster("dgx-h100").sized(1), uniform=True)
    )
    assert scheme_of(plan, analysed("gpt")).name == "one device"
