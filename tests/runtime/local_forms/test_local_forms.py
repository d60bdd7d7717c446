"""Local forms: each registered once, dropout equal to one device's, look-ups in split tables."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from autopar.ir import Graph
from autopar.runtime.checking import Observation, differences, observe
from autopar.runtime.checking.check import one_device
from autopar.runtime.launch import run_ranks
from autopar.runtime.local_forms.attention_dropout import attention
from autopar.runtime.local_forms.dropout import dropout, native_dropout
from autopar.runtime.local_forms.shard_lookup import padding_row, shard_index
from autopar.runtime.lowering import lower
from autopar.runtime.module.parallel_module import ModuleOptions, ParallelModule
from autopar.runtime.operators.functions import function_of
from autopar.runtime.operators.registry import form_of, register, standing_in
from autopar.runtime.random_numbers.draw_state import Draws, drawing
from autopar.runtime.ranks.cuts import cuts_of
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.communication import COMMUNICATIONS
from autopar.sharding.layout import parse_layout
from autopar.sharding.program import Program
from tests.runtime.graphs import mlp
from tests.runtime.helpers import (
    GraphBuilder,
    alone,
    mesh_of,
    random_inputs,
    random_program,
    random_values,
)


@pytest.mark.parametrize("layout", ["S0 S0", "S0 R", "S0/3 S0/3", "S0 S0/6", "S0/6 S0"])
def test_rows_of_a_split_table(layout: str) -> None:
    """Over all ranks every row is found exactly where its shard holds it."""
    mesh = mesh_of((2, 2))
    size = 24
    actual = torch.zeros(size)
    for rank in range(4):
        cuts = cuts_of(parse_layout(layout), mesh.shape, mesh.coordinate(rank))
        shard = torch.arange(size)
        for cut in cuts:
            shard = shard.reshape(cut.parts, cut.degree, -1)[:, cut.coordinate].flatten()
        local, inside = shard_index(torch.arange(size), size, cuts)
        assert torch.equal(shard[local[inside]], torch.arange(size)[inside])
        actual += inside
        assert [padding_row(row, size, cuts) for row in range(size)] == torch.where(
            inside, local, -1
        ).tolist()
    assert actual.unique().numel() == 1 and actual[0] == (1 if "R" not in layout else 2)


def test_dropout_is_that_of_torch() -> None:
    x = torch.randn(8, 6)
    torch.manual_seed(5)
    expected = torch.nn.functional.dropout(x, 0.3, training=True)
    torch.manual_seed(5)
    assert torch.equal(dropout(x, 0.3, True, x.shape, (), 1), expected)


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("exact", [False, True])
def test_dropout_keeps_what_it_scales(p: float, exact: bool) -> None:
    x = torch.rand(8, 6) + 1
    with drawing(Draws(exact=exact)):
        dropped = [
            dropout(x, p, True, x.shape, (), 1),
            native_dropout(x, p, True, x.shape, (), 1)[0],
        ]
    for value in dropped:
        kept = value != 0
        torch.testing.assert_close(value[kept], x[kept] / (1 - p))
        assert not kept.all() and kept.any() == (p < 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_without_dropping_is_that_of_torch(causal: bool, grouped: bool) -> None:
    query, key, value = torch.randn(2, 4, 5, 8), *torch.randn(2, 2, 2 if grouped else 4, 5, 8)
    mask = None if causal else torch.rand(5, 5) > 0.3
    if mask is not None:
        mask[:, 0] = True
    got = attention(
        query,
        key,
        value,
        (2, 4, 5, 5),
        (),
        1,
        0.0,
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=grouped,
    )
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(
        got, sdpa(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    )


def _dropping() -> Graph:
    """Dropout of values, of channels and of attention weights, all in training mode."""
    g = GraphBuilder()
    x = g.input("x", 4, 4, 8, 4)
    w = g.parameter("w", 4, 4)
    h = g.one("aten.linear.default", (4, 4, 8, 4), input=x, weight=w, bias=None)
    h = g.one("aten.dropout.default", (4, 4, 8, 4), input=h, p=0.5, train=True)
    h = g.one(
        "aten.scaled_dot_product_attention.default",
        (4, 4, 8, 4),
        query=h,
        key=h,
        value=h,
        dropout_p=0.25,
        is_causal=True,
    )
    h = g.one("aten.dropout.default", (4, 4, 8, 4), input=h, p=0.25, train=True)
    return g.finish("dropping", [h])


def _gather() -> Graph:
    """A look-up with a split table, a reshape, a slice, a split and a mean."""
    g = GraphBuilder()
    ids = g.input("ids", 4, 8, dtype="int64")
    table = g.parameter("table", 16, 8)
    w = g.parameter("w", 8, 24)
    h = g.one("aten.embedding.default", (4, 8, 8), weight=table, indices=ids)
    h = g.one("aten.matmul.default", (4, 8, 24), self=h, other=w)
    pieces = [(4, 8, 8)] * 3
    sizes = (8, 8, 8)
    a, b, c = g.call("aten.split_with_sizes.default", pieces, self=h, split_sizes=sizes, dim=-1)
    a = g.one("aten.mul.Tensor", (4, 8, 8), self=a, other=b)
    a = g.one("aten.reshape.default", (4, 8, 4, 2), self=a, shape=(4, 8, 4, 2))
    c = g.one("aten.reshape.default", (4, 8, 4, 2), self=c, shape=(4, 8, 4, 2))
    a = g.one("aten.add.Tensor", (4, 8, 4, 2), self=a, other=c)
    a = g.one("aten.slice.Tensor", (4, 8, 3, 2), self=a, dim=2, start=1, end=4)
    a = g.one("aten.mean.dim", (4, 1, 3, 2), self=a, dim=(1,), keepdim=True)
    a = g.one("aten.expand.default", (4, 8, 3, 2), self=a, size=(4, 8, 3, 2))
    return g.finish("gather", [a])


def _observe_all(
    programs: list[Program],
    values: dict[str, torch.Tensor],
    inputs: list[torch.Tensor],
    exact: bool,
) -> list[Observation]:
    groups = DeviceGroups.create(programs[0].assignment.mesh)
    seed = 4 if exact else 4 + groups.rank
    modules = (
        ParallelModule(program, groups, values, options=ModuleOptions(exact_random=exact))
        for program in programs
    )
    seen = [observe(module, inputs, optimizer="sgd", steps=2, seed=seed) for module in modules]
    return seen if groups.rank == 0 else []


@pytest.mark.parametrize(
    ("build", "exact"), [(_dropping, True), (_dropping, False), (_gather, True)]
)
def test_random_plans(build: Callable[[], Graph], exact: bool) -> None:
    """On ranks as on one device; drawn by counter also where the ranks' generators differ."""
    graph = build()
    values = random_values(graph)
    inputs = random_inputs(graph)
    if graph.name == "gather":
        inputs[0] = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(2))
    programs = [random_program(graph, mesh_of((2, 2)), seed) for seed in range(8)]
    reference = observe(
        alone(graph, values, exact_random=exact), inputs, optimizer="sgd", steps=2, seed=4
    )
    for observed in run_ranks(_observe_all, 4, programs, values, inputs, exact)[0]:
        report = differences(reference, observed, optimizer="sgd")
        assert report.passed, report


def test_the_local_program_reads_well() -> None:
    """Nodes carry the operators' names; the code of a segment is plain calls."""
    graph = mlp()
    (segment,) = (local := lower(one_device(graph), DeviceGroups.single())).segments
    code = segment.module.code
    assert re.search(r"def forward\(self, up_weight, up_bias, down_weight, down_bias, x\)", code), (
        "parameters come as they are used"
    )
    assert re.search(
        r"linear_0 = torch\.ops\.aten\.linear\.default\(input = x, weight = up_weight, bias = "
        r"up_bias\)",
        code,
    )
    assert [name for name, _ in segment.parameters] == [
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    ]
    assert segment.sources == local.sources == (("x", None),)
    assert local.loss == 2


def test_functions_of_kinds() -> None:
    assert function_of("aten.add.Tensor") is torch.ops.aten.add.Tensor
    assert float(function_of("autopar.mean_square")(x=torch.tensor([3.0, 4.0]), count=5)) == 5.0
    assert float(function_of("autopar.add")(a=torch.tensor(1.0), b=torch.tensor(2.0))) == 3.0
    for kind in ("aten.nothing.default", "onnx.Nothing"):
        with pytest.raises(ValueError, match="unsupported operator"):
            function_of(kind)


def test_a_kind_has_one_local_form() -> None:
    form = form_of("aten.embedding.default")
    assert form.local is not None and form_of("aten.nothing.default").local is None
    with pytest.raises(ValueError, match=r"aten\.embedding\.default has a local form already"):
        register("aten.embedding.default", function=form.local)
    with (
        standing_in("aten.embedding.default", form_of("ring")),
        standing_in("autopar.nothing", form),
    ):
        assert (
            form_of("aten.embedding.default").talks is not None
            and form_of("autopar.nothing") == form
        )
    assert form_of("aten.embedding.default") == form and form_of("autopar.nothing").local is None


@pytest.mark.parametrize("word", COMMUNICATIONS)
def test_every_priced_communication_has_a_local_form(word: str) -> None:
    assert form_of(word).talks is not None
