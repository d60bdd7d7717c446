"""Attention whose scores are capped is one operator, also with a learned bias, on ranks, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cli import run
from autopar.frontends.torch import import_torch
from autopar.ir import Operator
from autopar.ir.recipes import WINDOWED
from tests.frontends.torch.test_importer import compare_with_eager
from tests.raising.drawn_plans import drawn_plans_equal
from tests.raising.test_attention import MASK, UNEVEN, Attention, Weights, X

tf = pytest.importorskip("transformers")
SLOW = (pytest.mark.slow, pytest.mark.ci)

ONE: dict[str, tuple[dict[str, Any], Weights]] = {
    "a cap": ({"cap": 5.0}, lambda q, k, b: ((q @ k.mT) * 0.5 / 5).tanh().mul(5).softmax(-1)),
    "a cap by products": (
        {"cap": 2.0},
        lambda q, k, b: (torch.tanh((q @ k.mT) * 0.25) * 2).softmax(-1),
    ),
    "a cap before a mask": (
        {"cap": 5.0, "is_causal": True},
        lambda q, k, b: (((q @ k.mT) * 0.5 / 5).tanh() * 5 + MASK).softmax(-1),
    ),
    "a cap before an uneven mask": (
        {"cap": 5.0, "masked": True},
        lambda q, k, b: (((q @ k.mT) * 0.5 / 5).tanh() * 5 + UNEVEN).softmax(-1),
    ),
    "a cap and a bias with a mask": (
        {"cap": 5.0, "masked": True},
        lambda q, k, b: (((q @ k.mT) * 0.5 / 5).tanh() * 5 + (b + MASK.clamp(min=-9))).softmax(-1),
    ),
    "a cap and a bias": (
        {"cap": 5.0, "masked": True},
        lambda q, k, b: (((q @ k.mT) * 0.5 / 5).tanh() * 5 + b).softmax(-1),
    ),
}
OTHERS: dict[str, Weights] = {
    "a cap after the mask": lambda q, k, b: (((q @ k.mT + UNEVEN) / 5).tanh() * 5).softmax(-1),
    "a learned bias alone": lambda q, k, b: ((q @ k.mT) * 0.5 + b).softmax(-1),
    "a cap below zero": lambda q, k, b: (((q @ k.mT) / 5).tanh() * -5).softmax(-1),
}


def attentions(module: nn.Module) -> list[Operator]:
    """The operators of attention of our own."""
    return [op for op in import_torch(module, (X,)).graph.operators if op.kind == WINDOWED]


@pytest.mark.parametrize("name", ONE)
def test_capped_attention_is_one_operator(name: str) -> None:
    given, weights = ONE[name]
    module = Attention(weights)
    (op,) = attentions(module)
    seen = {key: op.attributes[key] for key in ("cap", "is_causal") if key in op.attributes}
    assert seen | ({"masked": True} if len(op.inputs) > 3 else {}) == given
    assert op.attributes["scale"] == pytest.approx(0.5)
    compare_with_eager(module, X)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are_written(name: str) -> None:
    module = Attention(OTHERS[name])
    assert attentions(module) == []
    compare_with_eager(module, X)


def loss_of(outputs: Tensor, *inputs: Tensor) -> Tensor:
    return outputs.square().mean()


@pytest.mark.parametrize("sizes", [(2,), pytest.param((2, 2), marks=SLOW)])
def test_drawn_plans_equal_one_device(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    names = ("a cap before a mask", "a cap and a bias")
    module = nn.Sequential(*(Attention(ONE[name][1]) for name in names))
    given = X.repeat(2, 1, 1)[:4]
    model = import_torch(module, (given,), loss=loss_of)
    assert sum(op.kind == WINDOWED for op in model.graph.operators) == len(names)
    values: dict[str, Any] = {**dict(module.named_parameters()), **dict(model.constants)}
    values = {name: value.detach() for name, value in values.items()}
    drawn_plans_equal(model.graph, values, [given], sizes)


GEMMA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 3,
    "attn_logit_softcapping": 0.5,
    "attn_implementation": "eager",
}


def test_a_plan_of_gemma_2_equals_one_device(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tf.Gemma2Config(**GEMMA).to_json_file(tmp_path / "model" / "config.json")
    model = f"hf:{tmp_path / 'model' / 'config.json'}"
    path = str(tmp_path / "plan.json")
    given = ["--cluster", "local-cpu", "--devices", "2", "--mesh", "2", "--dtype", "float32"]
    sizes = ["--batch", "4", "--dim", "sequence=8", "-o", path]
    assert run(["plan", model, *given, *sizes]) == 0
    assert run(["run", path, "--model", model, "--check"]) == 0
    kinds = [operator.kind for operator in autopar.Plan.load(path).operators.values()]
    assert kinds.count(WINDOWED) == 2
