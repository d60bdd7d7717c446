"""Attention with sinks that is written out is one operator, alone and in gpt-oss, on ranks, too."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.cli import run
from autopar.frontends.load import ModelOptions, load_model
from autopar.frontends.torch import import_torch, reader
from autopar.ir import Operator
from autopar.ir.recipes import WINDOWED
from autopar.model import TorchModel
from autopar.runtime.checking import differences, observe
from autopar.runtime.import_proof import prove_import
from tests.frontends.torch.test_experts import Logits
from tests.frontends.torch.test_importer import compare_with_eager
from tests.raising.drawn_plans import drawn_plans_equal
from tests.runtime.helpers import alone

tf = pytest.importorskip("transformers")
HEADS = 4
LENGTH = 6
X = torch.randn(3, LENGTH, 16, generator=torch.Generator().manual_seed(0))
LEAST = torch.finfo(torch.float32).min
CAUSAL = torch.full((LENGTH, LENGTH), LEAST).triu(1)
WINDOW = CAUSAL + torch.full((LENGTH, LENGTH), -math.inf).tril(-2)
UNEVEN = CAUSAL.clone()
UNEVEN[3, 1] = -1.0
Weights = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Grouped attention whose weights are those of a function of scores, sinks and a bias."""

    def __init__(self, weights: Weights, by_expansion: bool = True) -> None:
        super().__init__()
        self.weights = weights
        self.by_expansion = by_expansion
        self.query = nn.Linear(16, HEADS * 4)
        self.both = nn.Linear(16, HEADS * 4)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH))

    def repeated(self, x: Tensor) -> Tensor:
        """Each head of keys for two heads of queries."""
        if not self.by_expansion:
            return x.repeat_interleave(2, 1)
        b, g, s, w = x.shape
        return x[:, :, None].expand(b, g, 2, s, w).reshape(b, 2 * g, s, w)

    def forward(self, x: Tensor) -> Tensor:
        """The values by the weights."""
        q = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        both = self.both(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (self.repeated(part) for part in both.chunk(2, 1))
        scores = q @ k.transpose(2, 3) * 0.5
        made = self.weights(scores, self.sinks, self.bias) @ v + self.bias.sum() * 0
        return made.transpose(1, 2).flatten(2)


def column(scores: Tensor, sinks: Tensor) -> Tensor:
    """Sinks as the scores of one more key."""
    return sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)


def joined(scores: Tensor, sinks: Tensor) -> Tensor:
    return torch.cat((scores, column(scores, sinks)), dim=-1)


def shifted(scores: Tensor) -> Tensor:
    """As transformers has it."""
    return scores - scores.max(dim=-1, keepdim=True).values


def weighed(scores: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    made = functional.softmax(scores, dim=-1, dtype=dtype)[..., :-1]
    return functional.dropout(made, p=0.0).to(scores.dtype)


ONE: dict[str, tuple[dict[str, Any], Weights]] = {
    "alone": ({}, lambda a, s, b: joined(a, s).softmax(-1)[..., :-1]),
    "shifted": (
        {"is_causal": True},
        lambda a, s, b: weighed(shifted(joined(a + CAUSAL.to(a.dtype), s))),
    ),
    "by amax": ({}, lambda a, s, b: weighed((c := joined(a, s)) - c.amax(-1, True))),
    "in single": (
        {"is_causal": True},
        lambda a, s, b: weighed(shifted(joined(a + CAUSAL.to(a.dtype), s)), torch.float32),
    ),
    "behind a window": (
        {"is_causal": True, "window": 2},
        lambda a, s, b: weighed(shifted(joined(a + WINDOW.to(a.dtype), s))),
    ),
    "behind a mask": ({"masked": True}, lambda a, s, b: weighed(joined(a + UNEVEN, s))),
    "with a learned bias": ({"masked": True}, lambda a, s, b: weighed(joined(a + b, s))),
    "by a view": (
        {},
        lambda a, s, b: weighed(
            torch.cat((a, s.view(1, HEADS, 1, 1).expand(len(a), HEADS, LENGTH, 1)), 3)
        ),
    ),
    "by new dims": (
        {},
        lambda a, s, b: weighed(
            torch.cat((a, s[None, :, None, None].expand(len(a), HEADS, LENGTH, 1)), 3)
        ),
    ),
}
OTHERS: dict[str, Weights] = {
    "the last key in place of the sink": lambda a, s, b: joined(a, s).softmax(-1)[..., 1:],
    "over queries": lambda a, s, b: joined(a, s).softmax(-2)[..., :-1],
    "less the mean": lambda a, s, b: weighed((c := joined(a, s)) - c.mean(-1, keepdim=True)),
    "a sink of a query": lambda a, s, b: weighed(
        torch.cat((a, b[0].reshape(1, 1, -1, 1).expand(len(a), HEADS, -1, 1)), -1)
    ),
    "sinks first": lambda a, s, b: torch.cat((column(a, s), a), -1).softmax(-1)[..., 1:],
}


def attentions(module: nn.Module, x: Tensor = X) -> list[Operator]:
    """The operators of attention with sinks."""
    return [op for op in import_torch(module, (x,)).graph.operators if op.kind == WINDOWED]


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("by_expansion", [True, False])
def test_attention_with_sinks_is_one_operator(name: str, by_expansion: bool) -> None:
    given, weights = ONE[name]
    module = Attention(weights, by_expansion)
    graph = import_torch(module, (X,)).graph
    (op,) = (op for op in graph.operators if op.kind == WINDOWED)
    assert [graph.tensors[each].shape[1] for each in op.inputs[:3]] == [HEADS, 2, 2]
    assert graph.tensors[op.inputs[3]].name.endswith("sinks")
    seen = {key: op.attributes[key] for key in ("is_causal", "window") if key in op.attributes}
    assert seen | ({"masked": True} if len(op.inputs) > 4 else {}) == given
    assert op.attributes["scale"] == pytest.approx(0.5)
    compare_with_eager(module, X)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are_written(name: str) -> None:
    module = Attention(OTHERS[name])
    assert attentions(module) == []
    compare_with_eager(module, X)


def test_a_file_of_onnx(tmp_path: Path) -> None:
    stored = {
        "shape": np.array([1, 2, 1, 1]),
        "spread": np.array([3, 2, 6, 1]),
        "half": np.array(0.5, np.float32),
        "mask": UNEVEN.numpy(),
        "start": np.array([0]),
        "end": np.array([-1]),
        "axis": np.array([-1]),
        "sinks": np.array([0.5, -0.5], np.float32),
    }
    steps = [
        ("Transpose", "k", "kt", {"perm": [0, 1, 3, 2]}),
        ("MatMul", "q kt", "p", {}),
        ("Mul", "p half", "s", {}),
        ("Add", "s mask", "m", {}),
        ("Reshape", "sinks shape", "r", {}),
        ("Expand", "r spread", "c", {}),
        ("Concat", "m c", "j", {"axis": -1}),
        ("ReduceMax", "j axis", "x", {"keepdims": 1}),
        ("Sub", "j x", "l", {}),
        ("Softmax", "l", "w", {"axis": -1}),
        ("Slice", "w start end axis", "z", {}),
        ("MatMul", "z v", "y", {}),
    ]
    nodes = [helper.make_node(kind, i.split(), [o], name=o, **a) for kind, i, o, a in steps]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (3, 2, 6, 4)) for n in "qkvy"]
    tensors = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "attention", ends[:3], ends[3:], tensors)
    path = tmp_path / "attention.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path
    )
    model = load_model(path, ModelOptions(train=False))
    (op,) = model.graph.operators
    assert (op.kind, op.inputs) == (WINDOWED, ("q", "k", "v", "sinks", "mask"))
    assert op.attributes["scale"] == pytest.approx(0.5)
    assert prove_import(model).proved


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TOKENS = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))


def gpt_oss() -> nn.Module:
    """A small gpt-oss of transformers whose sinks take up much of the weight."""
    torch.manual_seed(0)
    module = Logits(tf.GptOssForCausalLM(tf.GptOssConfig(**SIZES)))
    for name, value in module.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(value)
    return module


def loss_of(outputs: Tensor, *inputs: Tensor) -> Tensor:
    return outputs.square().mean()


def imported(monkeypatch: pytest.MonkeyPatch, *, as_written: bool = False) -> TorchModel:
    with monkeypatch.context() as patch:
        if as_written:
            patch.setattr(reader, "raised", lambda graph: graph)
        return import_torch(gpt_oss(), (TOKENS,), loss=loss_of)


def values_of(model: TorchModel) -> dict[str, Any]:
    """Parameters and constants by their names in the graph."""
    module = gpt_oss()
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.detach() for name, value in (named | dict(model.constants)).items()}


def test_gpt_oss_raised_computes_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = imported(monkeypatch)
    exported = imported(monkeypatch, as_written=True)
    given = [op.attributes for op in ours.graph.operators if op.kind == WINDOWED]
    assert [(each["is_causal"], each.get("window", 0)) for each in given] == [(True, 3), (True, 0)]
    assert not any("softmax" in op.kind for op in ours.graph.operators if "attn" in op.name)
    one, other = (
        observe(alone(model.graph, values_of(model)), [TOKENS], steps=2)
        for model in (ours, exported)
    )
    report = differences(other, one, graph=ours.graph)
    assert report.passed, str(report)


class Decoder(nn.Module):
    """Two layers of attention with sinks, to all keys and to a window."""

    def __init__(self) -> None:
        super().__init__()
        names = ("shifted", "behind a window")
        self.layers = nn.ModuleList(Attention(ONE[name][1]) for name in names)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_half_precision_rounds_no_more_than_what_is_written() -> None:
    torch.manual_seed(0)
    module = Decoder().bfloat16()
    x = X.bfloat16()
    assert len(attentions(module, x)) == 2
    plan = autopar.plan(module, (x,), devices=1, cluster="local-cpu", optimizer="sgd")
    planned = autopar.parallelize(copy.deepcopy(module), plan, (x,))
    exact = copy.deepcopy(module).float()(x.float())
    ours, written = ((made(x) - exact).norm() for made in (planned, module))
    assert ours < 1.2 * written


@pytest.mark.parametrize("ranks", ["2", "4"])
def test_a_plan_of_gpt_oss_equals_one_device(ranks: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tf.GptOssConfig(**SIZES).to_json_file(tmp_path / "model" / "config.json")
    model = f"hf:{tmp_path / 'model' / 'config.json'}"
    path = str(tmp_path / "plan.json")
    given = ["--cluster", "local-cpu", "--devices", ranks, "--mesh", ranks, "--dtype", "float32"]
    sizes = ["--batch", "8", "--dim", "sequence=8", "-o", path]
    assert run(["plan", model, *given, *sizes]) == 0
    assert run(["run", path, "--model", model, "--check"]) == 0


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_drawn_plans_equal_one_device(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = Decoder()
    given = X.repeat(2, 1, 1)[:4]
    model = import_torch(module, (given,), loss=loss_of)
    values: dict[str, Any] = {**dict(module.named_parameters()), **dict(model.constants)}
    values = {name: value.detach() for name, value in values.items()}
    drawn_plans_equal(model.graph, values, [given], sizes)
