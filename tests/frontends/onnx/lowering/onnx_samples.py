"""Random calls of the operators that models hold, by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import helper

from tests.frontends.onnx.lowering.onnx_cases import (
    OPSET,
    Case,
    Generator,
    axis_of,
    booleans,
    broadcast,
    floats,
    ints,
    shape,
)
from tests.frontends.onnx.lowering.onnx_samples_moving import MOVING


def _unary(kind: str, *, positive: bool = False, **attributes: Any) -> Callable[[Generator], Case]:
    return lambda rng: Case(
        kind=kind, inputs=[floats(rng, shape(rng), positive=positive)], attributes=attributes
    )


def _binary(
    kind: str, *, positive: bool = False, boolean: bool = False, integer: bool = False
) -> Callable[[Generator], Case]:
    def draw(rng: Generator) -> Case:
        a, b = broadcast(rng)
        if boolean:
            return Case(kind=kind, inputs=[booleans(rng, a), booleans(rng, b)], attributes={})
        if integer and rng.random() < 0.5:
            return Case(kind=kind, inputs=[ints(rng, -9, 9, a), ints(rng, 1, 9, b)], attributes={})
        return Case(
            kind=kind,
            inputs=[floats(rng, a, positive=positive), floats(rng, b, positive=positive)],
            attributes={},
        )

    return draw


def _variadic(kind: str) -> Callable[[Generator], Case]:
    def draw(rng: Generator) -> Case:
        a, b = broadcast(rng)
        return Case(
            kind=kind, inputs=[floats(rng, a), floats(rng, b), floats(rng, a)], attributes={}
        )

    return draw


def _reduce(kind: str, *, positive: bool = False) -> Callable[[Generator], Case]:
    def draw(rng: Generator) -> Case:
        x = floats(rng, shape(rng, 2, 4), positive=positive)
        chosen = rng.permutation(x.ndim)[: int(rng.integers(0, x.ndim + 1))]
        axes = np.where(rng.random(chosen.size) < 0.5, chosen, chosen - x.ndim).astype(np.int64)
        keep = {
            "keepdims": int(rng.integers(0, 2)),
            "noop_with_empty_axes": int(rng.integers(0, 2)),
        }
        return Case(
            kind=kind, inputs=[x, axes if axes.size else None], attributes=keep, stored=(1,)
        )

    return draw


def _along(kind: str, **attributes: Any) -> Callable[[Generator], Case]:
    def draw(rng: Generator) -> Case:
        x = floats(rng, shape(rng))
        return Case(kind=kind, inputs=[x], attributes={"axis": axis_of(rng, x.ndim), **attributes})

    return draw


def _argmax(rng: Generator) -> Case:
    x = ints(rng, 0, 4, shape(rng)).astype(np.float32)
    choice = {"keepdims": int(rng.integers(0, 2)), "select_last_index": int(rng.integers(0, 2))}
    return Case(kind="ArgMax", inputs=[x], attributes={"axis": axis_of(rng, x.ndim), **choice})


def _matmul(rng: Generator) -> Case:
    m, k, n, b = (int(v) for v in rng.integers(1, 6, 4))
    pairs = [
        ((b, m, k), (k, n)),
        ((m, k), (b, k, n)),
        ((k,), (b, k, n)),
        ((b, 1, m, k), (3, k, n)),
        ((k,), (k,)),
        ((m, k), (k,)),
    ]
    left, right = pairs[int(rng.integers(len(pairs)))]
    return Case(kind="MatMul", inputs=[floats(rng, left), floats(rng, right)], attributes={})


def _gemm(rng: Generator) -> Case:
    m, k, n = (int(v) for v in rng.integers(1, 6, 3))
    a = int(rng.integers(2))
    b = int(rng.integers(2))
    c = [None, floats(rng, (n,)), floats(rng, (m, 1)), floats(rng, (m, n))][int(rng.integers(4))]
    left = (k, m) if a else (m, k)
    right = (n, k) if b else (k, n)
    numbers = {"transA": a, "transB": b, "alpha": 0.5, "beta": 1.5}
    return Case(kind="Gemm", inputs=[floats(rng, left), floats(rng, right), c], attributes=numbers)


def _einsum(rng: Generator) -> Case:
    sizes = {letter: int(rng.integers(1, 5)) for letter in "bijk"}
    equation = ["bij,bjk->bik", "bij,kj->bk", "ij,ij->", "ij->ji", "bij,bkj->bik"][
        int(rng.integers(5))
    ]
    inputs = [
        floats(rng, [sizes[letter] for letter in part])
        for part in equation.split("->")[0].split(",")
    ]
    return Case(kind="Einsum", inputs=inputs, attributes={"equation": equation})


def _window(rng: Generator, dims: int) -> dict[str, list[int]]:
    return {
        "strides": rng.integers(1, 3, dims).tolist(),
        "dilations": rng.integers(1, 3, dims).tolist(),
        "pads": rng.integers(0, 2, 2 * dims).tolist(),
    }


def _convolution(rng: Generator) -> Case:
    dims = int(rng.integers(1, 3))
    group = int(rng.integers(1, 3))
    x = floats(rng, (2, 2 * group, *[8] * dims))
    w = floats(rng, (3 * group, 2, *rng.integers(1, 4, dims).tolist()))
    bias = floats(rng, (3 * group,)) if rng.random() < 0.5 else None
    attributes: dict[str, Any] = {
        "group": group,
        "kernel_shape": list(w.shape[2:]),
        **_window(rng, dims),
    }
    if rng.random() < 0.3:
        del attributes["pads"]
        attributes.update(
            auto_pad=["SAME_UPPER", "SAME_LOWER", "VALID"][int(rng.integers(3))],
            dilations=[1] * dims,
        )
    return Case(kind="Conv", inputs=[x, w, bias], attributes=attributes)


def _transposed(rng: Generator) -> Case:
    x = floats(rng, (2, 2, 5, 4))
    w = floats(rng, (2, 3, *rng.integers(1, 4, 2).tolist()))
    return Case(kind="ConvTranspose", inputs=[x, w, floats(rng, (3,))], attributes=_window(rng, 2))


def _pool(kind: str) -> Callable[[Generator], Case]:
    def draw(rng: Generator) -> Case:
        dims = int(rng.integers(1, 3))
        attributes: dict[str, Any] = {
            "kernel_shape": rng.integers(2, 4, dims).tolist(),
            **_window(rng, dims),
        }
        if kind == "AveragePool":
            attributes["count_include_pad"] = int(rng.integers(2))
        return Case(kind=kind, inputs=[floats(rng, (2, 3, *[9] * dims))], attributes=attributes)

    return draw


def _resize(rng: Generator) -> Case:
    x = floats(rng, (1, 2, *rng.integers(3, 6, 2).tolist()))
    mode = ["nearest", "linear", "cubic"][int(rng.integers(3))]
    where = ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"][
        int(rng.integers(4))
    ]
    sizes = np.array([1, 2, *rng.integers(2, 9, 2)], np.int64)
    modes = {"mode": mode, "coordinate_transformation_mode": where}
    return Case(kind="Resize", inputs=[x, None, None, sizes], attributes=modes, stored=(3,))


def _normal(kind: str) -> Callable[[Generator], Case]:
    def draw(rng: Generator) -> Case:
        x = floats(rng, (2, 3, *shape(rng, 1, 2)))
        vectors = [floats(rng, (3,)), floats(rng, (3,))]
        if kind == "BatchNormalization":
            vectors += [floats(rng, (3,)), floats(rng, (3,), positive=True)]
        return Case(kind=kind, inputs=[x, *vectors], attributes={"epsilon": 0.01})

    return draw


def _layer_normal(kind: str) -> Callable[[Generator], Case]:
    def draw(rng: Generator) -> Case:
        x = floats(rng, shape(rng, 2, 4))
        axis = int(rng.integers(1, x.ndim))
        vectors = [floats(rng, x.shape[axis:]) for _ in range(1 if kind.startswith("RMS") else 2)]
        version = 23 if kind.startswith("RMS") else OPSET
        return Case(
            kind=kind,
            inputs=[x, *vectors],
            attributes={"axis": axis - (x.ndim if rng.random() < 0.5 else 0)},
            opset=version,
        )

    return draw


def _attention(rng: Generator) -> Case:
    b, groups, kv, q, k, d = (int(v) for v in rng.integers(1, 4, 6))
    heads = groups * kv
    mask = floats(rng, (q, k)) if rng.random() < 0.5 else None
    inputs = [
        floats(rng, (b, heads, q, d)),
        floats(rng, (b, kv, k, d)),
        floats(rng, (b, kv, k, d + 1)),
        mask,
    ]
    return Case(
        kind="Attention", inputs=inputs, attributes={"is_causal": int(rng.integers(2))}, opset=23
    )


def _lstm(rng: Generator) -> Case:
    t = 3
    b = 2
    i = 4
    h = 3
    d = int(rng.integers(1, 3))
    inputs = [
        floats(rng, (t, b, i)),
        floats(rng, (d, 4 * h, i)),
        floats(rng, (d, 4 * h, h)),
        floats(rng, (d, 8 * h)),
        None,
    ]
    states = [floats(rng, (d, b, h)), floats(rng, (d, b, h))]
    direction = "bidirectional" if d == 2 else "forward"
    return Case(
        kind="LSTM",
        inputs=[*inputs, *states],
        attributes={"hidden_size": h, "direction": direction},
        outputs=3,
        opset=14,
    )


def _where(rng: Generator) -> Case:
    a, b = broadcast(rng)
    return Case(
        kind="Where", inputs=[booleans(rng, a), floats(rng, b), floats(rng, a)], attributes={}
    )


def _clip(rng: Generator) -> Case:
    low = np.array(-0.5, np.float32) if rng.random() < 0.7 else None
    high = np.array(0.5, np.float32) if rng.random() < 0.7 else None
    return Case(
        kind="Clip",
        inputs=[floats(rng, shape(rng)), low, high],
        attributes={},
        stored=(1, 2) if rng.random() < 0.5 else (),
    )


def _cast(rng: Generator) -> Case:
    target = [np.int64, np.float16, np.float64, np.bool_, np.int32][int(rng.integers(5))]
    return Case(
        kind="Cast",
        inputs=[floats(rng, shape(rng)) * 9],
        attributes={"to": helper.np_dtype_to_tensor_dtype(np.dtype(target))},
    )


def _is_nan(rng: Generator) -> Case:
    x = floats(rng, shape(rng))
    return Case(
        kind="IsNaN",
        inputs=[np.where(rng.random(x.shape) < 0.3, np.float32(np.nan), x)],
        attributes={},
    )


def _power(rng: Generator) -> Case:
    a, b = broadcast(rng)
    return Case(kind="Pow", inputs=[floats(rng, a, positive=True), floats(rng, b)], attributes={})


def _not(rng: Generator) -> Case:
    return Case(kind="Not", inputs=[booleans(rng, shape(rng))], attributes={})


def _lrn(rng: Generator) -> Case:
    return Case(
        kind="LRN",
        inputs=[floats(rng, (2, 6, 3, 3))],
        attributes={"size": int(rng.choice([1, 3, 5])), "alpha": 0.1, "bias": 2.0},
    )


def _dropout(rng: Generator) -> Case:
    return Case(kind="Dropout", inputs=[floats(rng, shape(rng))], attributes={})


def _global_pool(rng: Generator) -> Case:
    return Case(
        kind="GlobalAveragePool", inputs=[floats(rng, (2, 3, *shape(rng, 1, 3)))], attributes={}
    )


_UNARY = (
    "Abs",
    "Ceil",
    "Cos",
    "Erf",
    "Exp",
    "Identity",
    "Neg",
    "Relu",
    "Sigmoid",
    "Sin",
    "Softplus",
    "Tanh",
)
_BINARY = ("Add", "Sub", "Mul", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
SAMPLES: Mapping[str, Callable[[Generator], Case]] = {
    **{kind: _unary(kind) for kind in _UNARY},
    **{kind: _unary(kind, positive=True) for kind in ("Log", "Reciprocal", "Sqrt")},
    **{kind: _binary(kind, integer=True) for kind in _BINARY},
    **{kind: _variadic(kind) for kind in ("Sum", "Max", "Min", "Mean")},
    **{kind: _along(kind) for kind in ("Softmax", "LogSoftmax", "Hardmax", "Flatten")},
    **{
        f"Reduce{kind}": _reduce(f"Reduce{kind}")
        for kind in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare")
    },
    "ReduceLogSum": _reduce("ReduceLogSum", positive=True),
    "ReduceLogSumExp": _reduce("ReduceLogSumExp"),
    "And": _binary("And", boolean=True),
    "Or": _binary("Or", boolean=True),
    "Xor": _binary("Xor", boolean=True),
    "Div": _binary("Div", positive=True, integer=True),
    "Gelu": _unary("Gelu", approximate="tanh"),
    "Not": _not,
    "IsNaN": _is_nan,
    "Pow": _power,
    "Clip": _clip,
    "Cast": _cast,
    "Where": _where,
    "Dropout": _dropout,
    "ArgMax": _argmax,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Conv": _convolution,
    "ConvTranspose": _transposed,
    "MaxPool": _pool("MaxPool"),
    "AveragePool": _pool("AveragePool"),
    "GlobalAveragePool": _global_pool,
    "Resize": _resize,
    "LRN": _lrn,
    "BatchNormalization": _normal("BatchNormalization"),
    "InstanceNormalization": _normal("InstanceNormalization"),
    "LayerNormalization": _layer_normal("LayerNormalization"),
    "RMSNormalization": _layer_normal("RMSNormalization"),
    "Attention": _attention,
    "LSTM": _lstm,
    **MOVING,
}
