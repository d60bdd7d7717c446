"""Facts of a model that the search uses: parts of fused projections, classes of factors, and
operators that have no rule.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.errors import UnsupportedOperators
from autopar.ir import Graph, Operator, Ref, Role
from autopar.ir import Tensor as GraphTensor
from autopar.sharding.analysis import analyse
from autopar.sharding.classes import FactorClass
from autopar.sharding.layout import S
from autopar.sharding.rules import Call, preamble, registry, rule_of
from tests.sharding.assigned import graph_of

WIDTH = 24
HEADS = 4


class Layer(nn.Module):
    """Attention with a fused projection and a feed-forward block, both behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        heads = [
            t.view(b, s, HEADS, WIDTH // HEADS).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(WIDTH, dim=-1)
        ]
        a = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(b, s, WIDTH)
        x = x + self.out(a)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.fixture(scope="module")
def layer() -> Graph:
    return graph_of(Layer(), 6, 12, WIDTH)


def test_a_fused_projection_is_offered_in_three_parts_up_to_its_parameter(layer: Graph) -> None:
    analysis = analyse(layer, train=True)
    projection = analysis.offers["qkv/linear"]
    assert {"n", "n/3"} <= {option.name for option in projection.options}
    split = next(option for option in projection.options if option.name == "n/3")
    assert split.inputs[1:] == (S(0, 3), S(0, 3)) and split.outputs == (S(2, 3),)
    assert S(0, 3) in analysis.kinds["qkv.weight"] and S(0, 3) in analysis.kinds["qkv.bias"]
    assert (
        S(0, 3) not in analysis.kinds["out.weight"] and S(0, 3) not in analysis.kinds["up.weight"]
    )
    cut = next(op for op in layer.operators if "split" in op.kind)
    names = {option.name: option for option in analysis.offers[cut.name].options}
    assert names["n"].inputs == (S(2, 3),) and names["n"].outputs == (S(2),) * 3


def test_classes_of_a_transformer_layer(layer: Graph) -> None:
    analysis = analyse(layer, train=True)
    actual = {
        (name, factor.name): analysis.classes[name][i]
        for name, offer in analysis.offers.items()
        for i, factor in enumerate(offer.rule.factors)
    }
    row = FactorClass.ROW
    hidden = FactorClass.HIDDEN
    inner = FactorClass.INNER
    for name in ("qkv/linear", "up/linear"):
        assert (actual[name, "d0"], actual[name, "d1"], actual[name, "k"], actual[name, "n"]) == (
            row,
            row,
            hidden,
            inner,
        )
    for name in ("out/linear", "down/linear"):
        assert (actual[name, "k"], actual[name, "n"]) == (inner, hidden)
    attention = next(name for name in analysis.offers if "attention" in name)
    assert (actual[attention, "g"], actual[attention, "d0"]) == (inner, row)
    norm = "norm1/layer_norm"
    assert (actual[norm, "d0"], actual[norm, "h0"]) == (row, hidden)


def test_operators_of_equal_signature_share_one_offer() -> None:
    graph = graph_of(
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))), 4, 8
    )
    offers = analyse(graph, train=True).offers
    assert offers["1.0/linear"] is offers["2.0/linear"] and offers["1.1/tanh"] is offers["2.1/tanh"]
    # The first layer's input carries no gradient, so its options differ.
    assert offers["0.0/linear"] is not offers["1.0/linear"]


class Masked(nn.Module):
    """A product with a mask made from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(8, 8).tril()
        return self.inner(x) @ mask


def test_what_depends_on_no_parameter_is_left_to_every_device() -> None:
    graph = graph_of(Masked(), 4, 8)
    analysis = analyse(graph, train=True)
    assert analysis.cold == {"ones", "tril"} and [op.name for op in analysis.warm] == [
        "inner/linear",
        "matmul",
        "loss/mean_square.0",
    ]
    assert (
        not analysis.gradients & {"x", "tril:0"}
        and {"inner.weight", "inner/linear:0", graph.loss} <= analysis.gradients
    )
    assert not analyse(graph, train=False).gradients


def test_unknown_operators_are_named_at_once() -> None:
    weight = GraphTensor(name="w", shape=(4,), dtype="float32", role=Role.PARAMETER, trainable=True)
    made = {f"t{i}": GraphTensor(name=f"t{i}", shape=(4,), dtype="float32") for i in range(4)}
    kinds = ("aten.reluu.default", "onnx.Foo", "onnx.Foo", "aten.tanh.default")
    operators = tuple(
        Operator(
            name=f"op{i}", kind=kind, inputs=("w",), outputs=(f"t{i}",), attributes={"self": Ref(0)}
        )
        for i, kind in enumerate(kinds)
    )
    graph = Graph(
        name="unknown",
        tensors={"w": weight, **made},
        operators=operators,
        inputs=(),
        outputs=tuple(made),
    )
    with pytest.raises(UnsupportedOperators) as caught:
        analyse(graph, train=False)
    assert (
        caught.value.counts == {"aten.reluu.default": 1, "onnx.Foo": 2}
        and caught.value.exit_code == 3
    )
    assert "2 unsupported operator kinds" in str(
        caught.value
    ) and "nearest known: aten.relu.default" in str(caught.value)


# --- what no parameter leads to ---

SMALL = 4
WIDE = 64
KINDS = {
    "aten.relu.default": True,
    "aten.sign.default": True,
    "aten.msort.default": False,
    "onnx.Foo": None,
    "aten.sum.default": None,
}
"""Whether the rule splits something; None: there is no rule, or no more than a number is made."""


@st.composite
def _free_graphs(draw: st.DrawFn) -> Graph:
    """Operators on a small and on a wide input, that no parameter leads to."""
    sizes = {"small": SMALL, "wide": WIDE}
    tensors = {
        name: GraphTensor(name=name, shape=(size,), dtype="float32", role=Role.INPUT)
        for name, size in sizes.items()
    }
    operators = []
    for i in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(sorted(KINDS)))
        source = draw(st.sampled_from(sorted(tensors)))
        shape = tensors[source].shape if kind != "aten.sum.default" else ()
        tensors[f"t{i}"] = GraphTensor(name=f"t{i}", shape=shape, dtype="float32")
        operators.append(
            Operator(
                name=f"op{i}",
                kind=kind,
                inputs=(source,),
                outputs=(f"t{i}",),
                attributes={"self": Ref(0)},
            )
        )
    return Graph(
        name="free", tensors=tensors, operators=tuple(operators), inputs=tuple(sizes), outputs=()
    )


def _reached(graph: Graph, start: str) -> set[str]:
    """Names of the operators that one leads to, itself among them."""
    reached = {start}
    by_name = {op.name: op for op in graph.operators}
    for op in graph.operators:
        if any(set(by_name[name].outputs) & set(op.inputs) for name in reached):
            reached.add(op.name)
    return reached


@settings(max_examples=200, deadline=None)
@given(_free_graphs())
def test_large_values_are_decided_by_the_search(graph: Graph) -> None:
    """Ordinary is exactly what a large operator that can be split leads to, unless that leads to
    what cannot be ordinary.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "LARGE", 4 * SMALL)
        ordinary = {op.name for op in graph.operators} - preamble(graph)
    kinds = {op.name: op.kind for op in graph.operators}
    large = {
        op.name
        for op in graph.operators
        if graph.tensors[op.outputs[0]].shape == (WIDE,) and KINDS[op.kind]
    }
    wanted: set[str] = set()
    for name in large:
        reached = _reached(graph, name)
        if all(KINDS[kinds[other]] is not None for other in reached):
            wanted |= reached
    assert ordinary == wanted
    assert preamble(graph) == set(kinds), "what is small is made whole on every device"


def test_equal_elements_are_made_as_any_shard() -> None:
    """And what counts places, whole."""
    made = {
        "ones": "aten.ones.default",
        "full": "aten.full.default",
        "arange": "aten.arange.default",
    }
    tensors = {
        f"{name}:0": GraphTensor(name=f"{name}:0", shape=(8,), dtype="float32") for name in made
    }
    operators = tuple(
        Operator(name=name, kind=kind, inputs=(), outputs=(f"{name}:0",))
        for name, kind in made.items()
    )
    graph = Graph(name="made", tensors=tensors, operators=operators, inputs=(), outputs=())
    splits = {op.name: bool(rule_of(Call.of(graph, op)).splittable()) for op in operators}
    assert splits == {"ones": True, "full": True, "arange": False}
