"""Attention that is written out in products is one operator, whatever its scale and mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from autopar.frontends.load import ModelOptions, load_model
from autopar.frontends.torch import import_torch
from autopar.ir import Operator
from autopar.runtime.import_proof import prove_import
from tests.frontends.torch.test_importer import compare_with_eager

WIDTH = 8
HEADS = 2
X = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(0))
MASK = torch.full((6, 6), -math.inf).triu(1)
UNEVEN = MASK.clone()
UNEVEN[3, 1] = -1.0
KIND = "aten.scaled_dot_product_attention.default"
Weights = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Attention whose weights are those of a function of queries, keys and a learned bias."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        """The values by the weights."""
        parts = self.inner(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        made = torch.matmul(self.weights(q, k, self.bias), v) + self.bias.sum() * 0
        return made.transpose(1, 2).flatten(2)


def guarded(weights: Tensor) -> Tensor:
    """Zeros for rows that see nothing."""
    return torch.where(weights.isnan(), 0.0, weights)


NEITHER = (False, False)
CAUSAL = (True, False)
MASKED = (False, True)
ONE: dict[str, tuple[float, tuple[bool, bool], Weights]] = {
    "scores": (0.5, NEITHER, lambda q, k, b: ((q @ k.transpose(2, 3)) * 0.5).softmax(-1)),
    "divided": (0.5, NEITHER, lambda q, k, b: ((q @ k.mT) / math.sqrt(4.0)).softmax(dim=-1)),
    "both operands": (0.5, NEITHER, lambda q, k, b: ((q * 0.25) @ (k.mT * 2.0)).softmax(-1)),
    "in float": (1.0, NEITHER, lambda q, k, b: (q @ k.permute(0, 1, 3, 2)).float().softmax(-1)),
    "dropped with no chance": (
        1.0,
        NEITHER,
        lambda q, k, b: functional.dropout((q @ k.mT).softmax(-1), 0.0),
    ),
    "causal": (0.5, CAUSAL, lambda q, k, b: ((q @ k.mT) * 0.5 + MASK).softmax(-1)),
    "causal, the mask before": (1.0, CAUSAL, lambda q, k, b: (MASK + q @ k.mT).softmax(-1)),
    "guarded": (1.0, CAUSAL, lambda q, k, b: guarded((q @ k.mT + MASK).softmax(-1))),
    "a mask": (1.0, MASKED, lambda q, k, b: (q @ k.mT + UNEVEN).softmax(-1)),
}
OTHERS: dict[str, Weights] = {
    "a mask that is scaled": lambda q, k, b: ((q @ k.mT + MASK.clamp(min=-9)) * 0.5).softmax(-1),
    "over queries": lambda q, k, b: (q @ k.mT).softmax(-2),
    "keys as they are": lambda q, k, b: (q @ k.mT @ k @ k.mT).mT.softmax(-1),
    "a mask that is doubled": lambda q, k, b: torch.add(q @ k.mT, MASK, alpha=2).softmax(-1),
    "ones for rows that see nothing": lambda q, k, b: torch.where(
        (p := (q @ k.mT).softmax(-1)).isnan(), 1.0, p
    ),
    "one head of keys": lambda q, k, b: (q @ k[:, :1].mT).softmax(-1),
    "no softmax": lambda q, k, b: (q @ k.mT).sigmoid(),
}


def attentions(module: nn.Module) -> list[Operator]:
    """The operators of attention."""
    return [op for op in import_torch(module, (X,)).graph.operators if op.kind == KIND]


@pytest.mark.parametrize("name", ONE)
def test_products_around_a_softmax_are_attention(name: str) -> None:
    scale, (causal, masked), weights = ONE[name]
    module = Attention(weights)
    (op,) = attentions(module)
    assert op.attributes["scale"] == pytest.approx(scale)
    assert len(op.inputs) == 3 + masked and bool(op.attributes.get("is_causal")) == causal
    compare_with_eager(module, X)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are_written(name: str) -> None:
    module = Attention(OTHERS[name])
    assert attentions(module) == []
    compare_with_eager(module, X)


def test_a_file_that_turns_the_matrices_of_all_heads_in_one_dim(tmp_path: Path) -> None:
    """As torch's exporter writes attention for versions of ONNX without it."""
    stored = {
        "joined": np.array([-1, 6, 4]),
        "apart": np.array([3, 2, 4, 6]),
        "root": np.array(math.sqrt(0.5), np.float32),
    }
    steps = [
        ("Reshape", "k joined", "kj", {}),
        ("Transpose", "kj", "kt", {"perm": [0, 2, 1]}),
        ("Reshape", "kt apart", "ka", {}),
        ("Mul", "q root", "qs", {}),
        ("Mul", "ka root", "ks", {}),
        ("MatMul", "qs ks", "s", {}),
        ("Softmax", "s", "w", {"axis": -1}),
        ("MatMul", "w v", "y", {}),
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
    assert (op.kind, op.inputs, op.outputs) == (KIND, ("q", "k", "v"), ("y",))
    assert op.attributes["scale"] == pytest.approx(0.5)
    assert prove_import(model).proved
