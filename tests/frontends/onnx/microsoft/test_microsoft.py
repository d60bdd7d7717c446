"""Operators of onnxruntime give what onnxruntime gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from autopar.errors import ModelError
from autopar.frontends.onnx import import_onnx, load_weights
from autopar.frontends.onnx.microsoft import OPERATORS
from autopar.runtime.models.onnx_module import OnnxModule, to_torch

onnxruntime = pytest.importorskip("onnxruntime")
RNG = np.random.default_rng(0)
Array = np.ndarray


def f(*shape: int) -> Array:
    """Normal numbers."""
    return RNG.standard_normal(shape).astype(np.float32)


def u8(*shape: int) -> Array:
    """Bytes."""
    return RNG.integers(0, 255, shape).astype(np.uint8)


def i8(*shape: int) -> Array:
    """Bytes with a sign."""
    return RNG.integers(-127, 127, shape).astype(np.int8)


def ids(below: int, *shape: int) -> Array:
    """Whole numbers."""
    return RNG.integers(0, below, shape).astype(np.int32)


def s(value: float) -> Array:
    """A scale."""
    return np.array(value, np.float32)


def z(value: int) -> Array:
    """A zero point."""
    return np.array(value, np.uint8)


def i32(*values: Any) -> Array:
    """Whole numbers."""
    return np.array(values[0] if len(values) == 1 else values, np.int32)


POSITIONS = np.arange(8)[:, None]
COS, SIN = (fn(POSITIONS * 0.3 ** np.arange(4)).astype(np.float32) for fn in (np.cos, np.sin))
WIDE = [fn(POSITIONS * 0.3 ** np.arange(8)).astype(np.float32) for fn in (np.cos, np.sin)]
X = f(2, 5, 16)
MASK = i32([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def grouped(rows: int, past: int, total: int, lengths: list[int], *further: Array) -> list[Any]:
    """The inputs of grouped attention."""
    new = [f(2, rows, 64), f(2, rows, 32), f(2, rows, 32)]
    return [*new, f(2, 2, past, 16), f(2, 2, past, 16), i32(lengths), i32(total), *further]


HEADS: dict[str, Any] = {"num_heads": 4}
GROUPS: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2}
ROTARY: dict[str, Any] = {**GROUPS, "do_rotary": 1}
PAIR = [u8(2, 3), s(0.1), z(120), u8(2, 3), s(0.2), z(10), s(0.3), z(100)]
ONE = [s(0.1), z(120), s(0.1), z(100)]
EXPERTS = [f(6, 8), f(6, 4), f(4, 16, 8), f(4, 16), f(4, 8, 16), f(4, 8)]
# The operator, its inputs, the number of its outputs, the places of stored inputs, attributes.
CASES: list[tuple[str, list[Any], int, Sequence[int], dict[str, Any]]] = [
    ("FusedMatMul", [f(2, 3, 4), f(2, 5, 4)], 1, (), {"transB": 1, "alpha": 0.5}),
    ("FusedMatMul", [f(4, 2, 5, 3), f(2, 5, 3, 6)], 1, (), {"transBatchA": 1}),
    ("FusedGemm", [f(3, 4), f(4, 5), f(5)], 1, (), {"activation": "Relu"}),
    (
        "FusedConv",
        [f(1, 3, 8, 8), f(4, 3, 3, 3), f(4), f(1, 4, 8, 8)],
        1,
        (1, 2),
        {"pads": [1] * 4, "activation": "Relu"},
    ),
    (
        "FusedConv",
        [f(1, 3, 8, 8), f(4, 3, 3, 3), f(4)],
        1,
        (1, 2),
        {"activation": "Clip", "activation_params": [-0.2, 0.4]},
    ),
    ("BiasGelu", [f(2, 3, 8), f(8)], 1, (), {}),
    ("FastGelu", [f(2, 3, 8), f(8)], 1, (), {}),
    ("Gelu", [f(2, 3)], 1, (), {}),
    ("QuickGelu", [f(2, 3)], 1, (), {}),
    ("SkipLayerNormalization", [f(2, 3, 8), f(2, 3, 8), f(8), f(8), f(8)], 1, (2, 3, 4), {}),
    ("SkipSimplifiedLayerNormalization", [f(2, 3, 8), f(2, 3, 8), f(8)], 1, (2,), {}),
    (
        "EmbedLayerNormalization",
        [ids(9, 2, 5), ids(2, 2, 5), f(9, 8), f(16, 8), f(2, 8), f(8), f(8), MASK],
        2,
        (2, 3, 4, 5, 6),
        {},
    ),
    ("Attention", [X, f(16, 48), f(48)], 1, (), {**HEADS, "unidirectional": 1}),
    ("Attention", [X, f(16, 48), f(48), i32(3, 5)], 1, (), HEADS),
    ("Attention", [X, f(16, 48), f(48), MASK], 1, (), HEADS),
    (
        "Attention",
        [X, f(16, 48), f(48), None, f(2, 2, 4, 3, 4)],
        2,
        (),
        {**HEADS, "unidirectional": 1},
    ),
    ("Attention", [X, f(16, 40), f(40)], 1, (), {**HEADS, "qkv_hidden_sizes": [16, 16, 8]}),
    ("MultiHeadAttention", [X, f(2, 7, 16), f(2, 7, 16), f(48)], 1, (), HEADS),
    ("MultiHeadAttention", [X, X, X, None, None, None, f(2, 4, 3, 4), f(2, 4, 3, 4)], 3, (), HEADS),
    (
        "MultiHeadAttention",
        [X, f(2, 4, 7, 4), f(2, 4, 7, 4), None, None, f(2, 4, 5, 7)],
        1,
        (),
        HEADS,
    ),
    ("RotaryEmbedding", [f(2, 3, 32), np.array([2]), COS, SIN], 1, (), {"interleaved": 1}),
    ("GroupQueryAttention", grouped(5, 0, 5, [4, 4]), 3, (6,), GROUPS),
    ("GroupQueryAttention", grouped(1, 5, 6, [5, 5], *WIDE), 3, (6,), ROTARY),
    ("GroupQueryAttention", grouped(5, 0, 5, [4, 4]), 3, (6,), {**GROUPS, "local_window_size": 2}),
    ("GroupQueryAttention", grouped(5, 8, 5, [4, 4]), 3, (6,), GROUPS),
    (
        "MatMulNBits",
        [f(3, 80), u8(16, 3, 16), f(16, 3), u8(16, 2)],
        1,
        (1, 2, 3),
        {"K": 80, "N": 16, "bits": 4, "block_size": 32},
    ),
    (
        "MatMulNBits",
        [f(3, 64), u8(16, 2, 32), f(16, 2), None, None, f(16)],
        1,
        (1, 2),
        {"K": 64, "N": 16, "bits": 8, "block_size": 32},
    ),
    ("QLinearAdd", PAIR, 1, (1, 2, 4, 5, 6, 7), {}),
    ("QLinearMul", PAIR, 1, (1, 2, 4, 5, 6, 7), {}),
    ("QLinearSigmoid", [u8(2, 3), *ONE], 1, (1, 2, 3, 4), {}),
    ("QLinearLeakyRelu", [u8(2, 3), *ONE], 1, (1, 2, 3, 4), {"alpha": 0.3}),
    ("QLinearSoftmax", [u8(2, 8), *ONE], 1, (1, 2, 3, 4), {"axis": 1, "opset": 13}),
    ("QLinearAveragePool", [u8(1, 3, 8, 8), *ONE], 1, (1, 2, 3, 4), {"kernel_shape": [2, 2]}),
    ("QLinearGlobalAveragePool", [u8(1, 3, 8, 8), *ONE], 1, (1, 2, 3, 4), {}),
    (
        "QLinearConcat",
        [s(0.1), z(100), u8(2, 3), s(0.2), z(3), u8(2, 4), s(0.3), z(7)],
        1,
        (0, 1, 3, 4, 6, 7),
        {"axis": 1},
    ),
    (
        "QLinearWhere",
        [RNG.random((2, 3)) > 0.5, u8(2, 3), s(0.1), z(1), u8(2, 3), s(0.2), z(2), s(0.3), z(3)],
        1,
        (2, 3, 5, 6, 7, 8),
        {},
    ),
    (
        "QGemm",
        [u8(3, 8), s(0.1), z(120), u8(8, 5), s(0.02), z(110), ids(99, 5), s(0.5), z(100)],
        1,
        range(1, 9),
        {},
    ),
    ("QGemm", [u8(3, 8), s(0.1), z(9), u8(5, 8), s(0.02), z(9)], 1, range(1, 6), {"transB": 1}),
    (
        "MatMulIntegerToFloat",
        [u8(3, 8), u8(8, 5), s(0.1), s(0.02), z(9), z(100), f(5)],
        1,
        range(1, 7),
        {},
    ),
    (
        "DynamicQuantizeMatMul",
        [f(3, 8), i8(8, 5), s(0.02), np.array(3, np.int8), f(5)],
        1,
        range(1, 5),
        {},
    ),
    (
        "QAttention",
        [u8(2, 5, 16), u8(16, 48), f(48), s(0.02), s(0.02), None, z(120), z(110)],
        1,
        (1, 2, 3, 4, 6, 7),
        HEADS,
    ),
    ("MoE", EXPERTS, 1, range(2, 6), {"k": 2, "activation_type": "relu"}),
    (
        "MoE",
        EXPERTS,
        1,
        range(2, 6),
        {"k": 2, "activation_type": "gelu", "normalize_routing_weights": 1},
    ),
]


def file(
    kind: str, inputs: Sequence[Any], outputs: int, stored: Sequence[int], attributes: Any
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A file of one operator, and what it is fed."""
    names = [f"i{k}" if value is not None else "" for k, value in enumerate(inputs)]
    results = [f"o{k}" for k in range(outputs)]
    node = helper.make_node(kind, names, results, name="node", domain="com.microsoft", **attributes)
    given = {n: v for k, (n, v) in enumerate(zip(names, inputs, strict=True)) if n}
    kept = {names[k]: inputs[k] for k in stored}
    fed = {name: value for name, value in given.items() if name not in kept}
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in fed.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in results],
        [numpy_helper.from_array(value, name) for name, value in kept.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), fed


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "stored", "attributes"),
    CASES,
    ids=[f"{place}-{case[0]}" for place, case in enumerate(CASES)],
)
def test_as_onnxruntime(
    kind: str, inputs: list[Any], outputs: int, stored: Sequence[int], attributes: dict[str, Any]
) -> None:
    model, fed = file(kind, inputs, outputs, stored, attributes)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    graph = import_onnx(model)
    made = OnnxModule(graph, load_weights(model))(*[to_torch(fed[name]) for name in graph.inputs])
    for actual, wanted in zip(made, session.run(None, fed), strict=True):
        # What is rounded to steps may be rounded the other way at a half.
        atol = 1 if wanted.dtype == np.uint8 else 2e-3
        exact = actual.detach().numpy().astype(np.float64)
        np.testing.assert_allclose(exact, wanted.astype(np.float64), atol=atol, rtol=1e-3)
    assert all(op.name == "node" or op.name.startswith("node/") for op in graph.operators)


def test_every_operator_is_tried() -> None:
    """But those that onnxruntime does not compute on a CPU, or by rounding what it is given."""
    others = {"DynamicQuantizeLSTM", "QLinearReduceMean", "SimplifiedLayerNormalization"}
    names = {name for domain, name in OPERATORS if domain}
    assert names - {case[0] for case in CASES} == others


def test_what_is_not_supported_is_refused_by_name() -> None:
    model, _ = file(
        "MatMulNBits",
        [f(3, 64), u8(16, 2, 16), f(16, 2), None, i32(*range(64))],
        1,
        (1, 2, 4),
        {"K": 64, "N": 16, "bits": 4, "block_size": 32},
    )
    with pytest.raises(ModelError, match=r"node 'node' \(com.microsoft.MatMulNBits\) has an order"):
        import_onnx(model)
    model, _ = file("GroupQueryAttention", grouped(5, 0, 5, [4, 4]), 3, (), GROUPS)
    with pytest.raises(ModelError, match=r"attends over 'i6' keys, .* give it by --value"):
        import_onnx(model)
    assert import_onnx(model, values={"i6": 5}).operators
