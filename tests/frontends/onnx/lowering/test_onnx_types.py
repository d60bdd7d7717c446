"""Element types that torch does not compute with: unsigned integers against numpy, narrow elements
against ml_dtypes, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from autopar.frontends.onnx import import_onnx
from autopar.frontends.onnx.folding import evaluate
from autopar.runtime.models.onnx_module import OnnxModule, to_torch

UNSIGNED = (np.uint16, np.uint32, np.uint64)
BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.floor_divide,
    "Mod": np.remainder,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Equal": np.equal,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
}


def numbers(dtype: type[np.unsignedinteger], *, zero: bool) -> np.ndarray:
    """The ends and the middle of the range, and numbers of every length between."""
    top = min(int(np.iinfo(dtype).max), 2**63 - 1)
    bits = np.iinfo(dtype).bits
    rng = np.random.default_rng(bits)
    drawn = [
        int(rng.integers(0, top, dtype=np.uint64, endpoint=True)) >> int(rng.integers(0, bits))
        for _ in range(60)
    ]
    edges = [1, 2, 3, top, top - 1, top // 2, top // 2 + 1, top // 2 + 2]
    values = np.array([*edges, *drawn], dtype)
    return np.append(values, dtype(0)) if zero else values[values > 0]


def computed(kind: str, *inputs: np.ndarray, **attributes: object) -> np.ndarray:
    """The result of an operator for known values."""
    names = [f"x{i}" for i in range(len(inputs))]
    node = helper.make_node(kind, names, ["y"], **attributes)
    given = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
        )
        for name, value in zip(names, inputs, strict=True)
    ]
    graph = helper.make_graph([node], kind, given, [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    (made,) = OnnxModule(import_onnx(model))(*[to_torch(value) for value in inputs])
    return made.numpy()


@pytest.mark.parametrize("dtype", UNSIGNED)
@pytest.mark.parametrize("kind", BINARY)
def test_unsigned_arithmetic_equals_numpy(kind: str, dtype: type[np.unsignedinteger]) -> None:
    a = numbers(dtype, zero=True)[:, None]
    b = numbers(dtype, zero=kind not in ("Div", "Mod"))[None, :]
    actual = computed(kind, a, b)
    with np.errstate(over="ignore"):
        wanted = BINARY[kind](a, b)
    assert actual.dtype == wanted.dtype and (actual == wanted).all()


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned_choices_equal_numpy(dtype: type[np.unsignedinteger]) -> None:
    a = numbers(dtype, zero=True)[:, None]
    b = numbers(dtype, zero=True)[None, :]
    low = np.array(5, dtype)
    high = np.array(min(int(np.iinfo(dtype).max), 2**63 - 1) - 7, dtype)
    rows = [
        ("Max", (a, b), np.maximum(a, b)),
        ("Min", (a, b), np.minimum(a, b)),
        ("Clip", (a, low, high), np.clip(a, low, high)),
        ("BitwiseNot", (a,), ~a),
    ]
    for kind, inputs, wanted in rows:
        assert (computed(kind, *inputs) == wanted).all(), kind
    # ONNX reduces no integers of 16 bits.
    for kind, function in (
        ()
        if dtype is np.uint16
        else (
            ("ReduceMax", np.max),
            ("ReduceMin", np.min),
            ("ReduceSum", np.sum),
            ("ReduceProd", np.prod),
        )
    ):
        with np.errstate(over="ignore"):
            wanted = function(a).astype(dtype)
        assert (computed(kind, a, keepdims=0) == wanted).all(), kind


NARROW = {
    TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: ml_dtypes.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    TensorProto.FLOAT4E2M1: ml_dtypes.float4_e2m1fn,
    TensorProto.UINT4: ml_dtypes.uint4,
    TensorProto.INT4: ml_dtypes.int4,
    TensorProto.UINT2: ml_dtypes.uint2,
    TensorProto.INT2: ml_dtypes.int2,
}


def cast(code: int, values: np.ndarray, **attributes: int | str) -> OnnxModule:
    """A model that casts to an element type and back to float32."""
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=code, **attributes),
        helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT),
    ]
    value = helper.make_tensor_value_info
    inputs = [value("x", helper.np_dtype_to_tensor_dtype(values.dtype), values.shape)]
    graph = helper.make_graph(nodes, "cast", inputs, [value("y", TensorProto.FLOAT, values.shape)])
    return OnnxModule(
        import_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)]))
    )


@pytest.mark.parametrize("code", NARROW, ids=TensorProto.DataType.Name)
def test_casts_round_as_ml_dtypes_does(code: int) -> None:
    dtype = NARROW[code]
    if "int" in np.dtype(dtype).name:
        values = np.arange(-40, 40, dtype=np.float32) / 2
        actual = cast(code, values)(to_torch(values))[0].numpy()
        assert (actual == values.astype(dtype).astype(np.float32)).all()
        return
    grid = np.unique(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float32))
    grid = grid[np.isfinite(grid)]
    values = np.concatenate(
        [
            grid,
            (grid[1:] + grid[:-1]) / 2,
            grid * np.float32(1.03),
            [np.inf, -np.inf, np.nan, 464, 465, 248, 61440],
        ]
    )
    values = values.astype(np.float32)
    actual = cast(code, values, saturate=0)(to_torch(values))[0].numpy()
    with np.errstate(all="ignore"):
        wanted = values.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(actual, wanted)
    largest = float(ml_dtypes.finfo(dtype).max)
    saturated = cast(code, values)(to_torch(values))[0].numpy()
    fine = np.abs(values) <= largest
    np.testing.assert_array_equal(saturated[fine], wanted[fine])
    assert (np.abs(saturated[np.abs(values) > largest]) == largest).all()


@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_scales_round_as_onnx_does(mode: str) -> None:
    values = np.concatenate(
        [np.linspace(0.01, 9, 400), [2.0**-130, 2.0**-127, 3e38, np.inf, np.nan, 1.5, 3.0, 0.0]]
    ).astype(np.float32)
    wanted = onnx.numpy_helper.to_float8e8m0(values, True, mode).astype(np.float32)
    actual = cast(TensorProto.FLOAT8E8M0, values, round_mode=mode)(to_torch(values))[0].numpy()
    np.testing.assert_array_equal(actual, wanted)


def test_narrow_weights_take_part() -> None:
    rng = np.random.default_rng(0)
    weight = rng.integers(-8, 8, (6, 4)).astype(ml_dtypes.int4)
    scale = rng.random(4).astype(np.float32)
    value = helper.make_tensor_value_info
    stored = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(scale, "s")]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=1),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "weight",
        [value("x", TensorProto.FLOAT, [3, 6])],
        [value("y", TensorProto.FLOAT, [3, 4])],
        stored,
    )
    module = OnnxModule(
        import_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])),
        [("w", weight), ("s", scale)],
    )
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    wanted = x @ torch.from_numpy(weight.astype(np.float32) * scale)
    assert torch.allclose(module(x)[0], wanted)


def test_folded_casts_saturate() -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E4M3FN)
    (actual,) = evaluate(
        node,
        [np.array([1e6, -1e6, 0.3], np.float32)],
        {"to": TensorProto.FLOAT8E4M3FN, "saturate": 1},
        {"": 22},
    )
    assert actual.astype(np.float32).tolist() == [448, -448, 0.3125]
