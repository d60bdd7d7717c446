"""Names of plans whose operators are pinned one by one, beyond the schemes users can ask for."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest

from autopar.costmodel import load_cluster
from autopar.plan import Plan
from autopar.planning.model.pins import Pins
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.schemes import Named, scheme_of
from autopar.schemes.pinning import stage_mesh
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import parse_layout
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SHAPE = Shape(
    layers=2,
    hidden=64,
    heads=8,
    kv_heads=8,
    ffn=256,
    vocab=128,
    sequence=64,
    gated=True,
    norm="rms_norm",
    bias=False,
    dropout=False,
)


@functools.cache
def analysis() -> Analysis:
    return analyse(transformer(SHAPE, batch=16).graph, train=True)


def named(
    operators: Mapping[str, Mapping[str, str]],
    sizes: tuple[int, ...] = (4,),
    storage: str | None = None,
) -> Named:
    cluster = load_cluster("dgx-h100").sized(4)
    stored = {} if storage is None else {"*weight": parse_layout(storage)}
    pins = Pins(operators=operators, storage=stored)
    asked = Request(
        cluster=cluster,
        mesh=stage_mesh(cluster, sizes),
        limits=pins,
        stages=1,
        micro_batches=1,
        zero=int(bool(stored)),
    )
    return scheme_of(search_plan(analysis().graph, asked), analysis())


PRODUCTS = ("*qkv", "*.out", "*mlp.gate", "*mlp.up", "*mlp.down", "head.logits")


@pytest.mark.parametrize(
    "name, products, others",
    [
        ("data", "d0", {"*core": "d0"}),
        ("ulysses", "d1", {"*core": "g"}),
        ("context", "d1", {"*core": "k"}),
        ("sequence", "d1", {"*core": "R"}),
        ("columns", "n", {"*core": "g"}),
        ("replicated", "R", {}),
    ],
)
def test_an_axis_is_named_by_what_its_products_split(
    name: str, products: str, others: dict[str, str]
) -> None:
    pins = {pattern: {"gpu": products} for pattern in PRODUCTS} | {
        pattern: {"gpu": option} for pattern, option in others.items()
    }
    actual = named(pins)
    assert actual.name == name and actual.axes == {"gpu": name}
    assert [str(factor) for factor in actual.factors] == [f"{name} 4"]
    assert "4 devices" in actual.sentence


TENSOR = {
    "*qkv": "n",
    "*.out": "k",
    "*mlp.gate": "n",
    "*mlp.up": "n",
    "*mlp.down": "k",
    "head.logits": "n",
    "*core": "g",
}


@pytest.mark.parametrize(
    "between, name", [("R", "megatron"), ("d1", "megatron-sp"), ("d0", "megatron-sp")]
)
def test_what_lies_between_tells_the_two_kinds_of_megatron(between: str, name: str) -> None:
    pins = TENSOR | {"*norm*": between, "*add*": between}
    assert named({pattern: {"gpu": option} for pattern, option in pins.items()}).name == name


def test_half_and_half_is_mixed() -> None:
    pins = {
        "*mlp.gate": "d0",
        "*mlp.up": "d0",
        "*mlp.down": "k",
        "*qkv": "n",
        "*.out": "k",
        "head.logits": "d1",
        "*core": "g",
    }
    assert named({pattern: {"gpu": option} for pattern, option in pins.items()}).name == "mixed"


def test_a_few_operators_that_differ_do_not_change_the_name() -> None:
    pins = {pattern: {"gpu": "d0"} for pattern in PRODUCTS} | {
        "layers.1.attention.out": {"gpu": "d1"}
    }
    del pins["*.out"]
    assert named(pins).name == "data"


def test_equal_axes_are_one_factor() -> None:
    actual = named({pattern: {"gpu0": "d0", "gpu1": "d0"} for pattern in PRODUCTS}, (2, 2))
    assert actual.name == "data" and actual.axes == {"gpu0": "data", "gpu1": "data"}
    assert actual.factors[0].size == 4


def test_storage_that_is_split_and_used_whole_is_zero() -> None:
    pins = {pattern: {"gpu": "d0"} for pattern in PRODUCTS}
    assert named(pins, storage="S0").name == "zero1" and named(pins, storage="R").name == "data"


def test_storage_that_is_split_as_it_is_used_is_not() -> None:
    assert (
        not named({pattern: {"gpu": option} for pattern, option in TENSOR.items()}).factors[0].zero
    )


def _stages(plan: Plan, **second: int) -> Plan:
    """The plan cut in two before its second layer; `second`: the axes of the mesh of the second
    stage, if it has another.
    """
    mesh = plan.model_dump()["mesh"]
    other = [axis | {"size": second.get(axis["name"], axis["size"])} for axis in mesh]
    cuts = zip(("embed.lookup", "layers.1.norm1"), (mesh, other), strict=True)
    stages = [
        {"first": first, "mesh": held, "forward": 1.0, "backward": 2.0, "memory": 1.0}
        for first, held in cuts
    ]
    return Plan.model_validate(plan.model_dump(by_alias=True) | {"stages": stages})


def test_stages_go_before() -> None:
    cluster = load_cluster("dgx-h100").sized(4)
    pins = Pins(operators={pattern: {"gpu": "d0"} for pattern in PRODUCTS})
    asked = Request(
        cluster=cluster,
        mesh=stage_mesh(cluster, (4,)),
        limits=pins,
        stages=1,
        micro_batches=1,
        zero=0,
    )
    plan = search_plan(analysis().graph, asked)
    assert scheme_of(_stages(plan), analysis()).name == "pipeline-1f1b 2 x data 4"
    uneven = scheme_of(_stages(plan, gpu=2), analysis())
    assert uneven.name == "pipeline-1f1b 2 x (data 4 | data 2)"
    assert uneven.has("data") and uneven.has("pipeline-1f1b")


def test_interleaved_stages_are_counted_without_their_chunks() -> None:
    cluster = load_cluster("dgx-h100").sized(4)
    plan = search_plan(
        analysis().graph,
        Request(cluster=cluster, mesh=stage_mesh(cluster, (4,)), stages=1, micro_batches=1, zero=0),
    )
    cut = _stages(plan).model_dump(by_alias=True)
    cut["schedule"] |= {"pipeline": "interleaved", "interleave": 2}
    cut["stages"] *= 2
    scheme = scheme_of(Plan.model_validate(cut), analysis())
    assert scheme.factors[0].scheme == "pipeline-interleaved" and scheme.factors[0].size == 2
