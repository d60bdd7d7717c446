"""Gradients of the ONNX operators: what autograd gives equals finite differences, in float64 on the
inputs of node tests.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

from autopar.frontends.onnx import import_onnx
from autopar.ir.dtype import cast_graph
from autopar.runtime.models.onnx_module import OnnxModule, to_torch
from tests.frontends.onnx.lowering.node_report import known_reason
from tests.frontends.onnx.lowering.node_tests import NodeTest, node_tests

LARGEST = 3100  # elements of the inputs of one test together
PER_KIND = 3
# Steps and choices whose derivative is zero or jumps, and what no training passes through.
FLAT = frozenset(
    {
        "Ceil",
        "Floor",
        "Round",
        "Sign",
        "Hardmax",
        "Equal",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
        "Not",
        "IsNaN",
        "IsInf",
        "Mod",
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "QLinearConv",
        "QLinearMatMul",
        "NonMaxSuppression",
        "Cast",
        "CastLike",
        "BitCast",
        "ArgMax",
        "ArgMin",
        "NonZero",
        "EyeLike",
        "OneHot",
        "Unique",
        "Shape",
        "Size",
        "Dropout",
    }
)
# Kinds that are smooth everywhere they are tested, and must be among the chosen ones.
EXPECTED = frozenset(
    {
        "Add",
        "Attention",
        "AveragePool",
        "BatchNormalization",
        "CausalConvWithState",
        "Concat",
        "Conv",
        "ConvTranspose",
        "CumSum",
        "DeformConv",
        "Det",
        "DFT",
        "Div",
        "Einsum",
        "Erf",
        "Exp",
        "Expand",
        "GRU",
        "Gather",
        "GatherElements",
        "GatherND",
        "Gelu",
        "Gemm",
        "GridSample",
        "GroupNormalization",
        "InstanceNormalization",
        "LRN",
        "LSTM",
        "LayerNormalization",
        "LinearAttention",
        "Log",
        "LogSoftmax",
        "LpPool",
        "MatMul",
        "MaxPool",
        "Mul",
        "NegativeLogLikelihoodLoss",
        "Pad",
        "Pow",
        "RMSNormalization",
        "RNN",
        "Reciprocal",
        "ReduceL2",
        "ReduceLogSumExp",
        "ReduceMax",
        "ReduceMean",
        "ReduceProd",
        "ReduceSum",
        "Reshape",
        "Resize",
        "RoiAlign",
        "RotaryEmbedding",
        "ScatterElements",
        "ScatterND",
        "Sigmoid",
        "Slice",
        "Softmax",
        "SoftmaxCrossEntropyLoss",
        "Softplus",
        "Split",
        "Sqrt",
        "Sub",
        "Swish",
        "Tanh",
        "TensorScatter",
        "Tile",
        "TopK",
        "Transpose",
        "Where",
    }
)


def fits(test: NodeTest) -> bool:
    """Whether a test is about real numbers, few enough, and its operator has a gradient."""
    values = [item for item in test.inputs if item.dtype.name in ("float32", "float64")]
    plain = all(
        item.dtype.kind in "biuf" and np.isfinite(item.astype(np.float64)).all()
        for item in test.inputs
    )
    small = sum(item.size for item in test.inputs) <= LARGEST
    plain = plain and all(item.size for item in test.inputs)
    return (
        bool(values)
        and plain
        and small
        and test.left_out is None
        and not test.expanded
        and test.base.op_type not in FLAT
    )


def chosen() -> dict[str, list[NodeTest]]:
    """Up to three tests of every kind, drawn under a seed."""
    by_kind: dict[str, list[NodeTest]] = defaultdict(list)
    tests = [test for test in node_tests() if fits(test)]
    for i in np.random.default_rng(0).permutation(len(tests)):
        read = (known_reason(tests[i].name) or "half").startswith("half")
        if read and len(by_kind[tests[i].base.op_type]) < PER_KIND:
            by_kind[tests[i].base.op_type].append(tests[i])
    return dict(by_kind)


def check(test: NodeTest) -> bool:
    """Whether the test has a real output to differentiate; fails where a gradient is wrong."""
    model, feeds = test.ready()
    graph = cast_graph(import_onnx(model), "float64")
    module = OnnxModule(graph).double()
    tensors = [to_torch(feed) for feed in feeds]
    noise = torch.Generator().manual_seed(0)
    # A little noise leads away from ties and corners, where finite differences mean nothing.
    inputs = [
        (
            value.double() + 1e-2 * torch.rand(value.shape, generator=noise, dtype=torch.float64)
        ).requires_grad_()
        if value.is_floating_point()
        else value
        for value in tensors
    ]
    places = [
        i
        for i, value in enumerate(module(*inputs))
        if value.is_floating_point() and value.requires_grad
    ]
    if not places:
        return False

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = module(*given)
        return tuple(results[i] for i in places)

    with torch.random.fork_rng():  # the fast mode compares along random directions
        torch.manual_seed(0)
        assert torch.autograd.gradcheck(function, inputs, atol=1e-4, rtol=1e-3, fast_mode=True)
    return True


def test_gradients_equal_finite_differences() -> None:
    wrong = {}
    checked = set()
    for kind, tests in sorted(chosen().items()):
        for test in tests:
            try:
                if check(test):
                    checked.add(kind)
            except Exception as error:  # all kinds are reported together
                wrong[test.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:250]}"
    print(f"{len(checked)} kinds checked: {', '.join(sorted(checked))}")
    assert not wrong
    assert checked >= EXPECTED, sorted(EXPECTED - checked)


@pytest.mark.parametrize("kind", ["Relu", "Abs", "Clip", "LeakyRelu", "Max"])
def test_kinds_with_corners_are_checked_away_from_them(kind: str) -> None:
    assert kind in chosen()
