"""Quantised operators of onnxruntime: dequantised, computed, and quantised again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from onnx import TensorProto

from autopar.frontends.onnx.writer import Writer

from .attention import attend


def _real(w: Writer, x: str, scale: str, zero: str, *, axis: int = 1) -> str:
    """The numbers that integers stand for."""
    along = {} if not w.shape(scale) or w.shape(scale) == (1,) else {"axis": axis}
    if along == {} and w.shape(scale):
        scale = w.reshape(scale)
        zero = w.reshape(zero) if zero else ""
    return str(w("DequantizeLinear", x, scale, *([zero] if zero else []), **along))


def _rounded(w: Writer, y: str, scale: str, zero: str) -> None:
    """The node's output: numbers as integers."""
    if not zero:
        zero = w.constant(0, TensorProto.UINT8)
    w.last("QuantizeLinear", y, w.reshape(scale), w.reshape(zero))


def of_two(kind: str) -> Callable[[Writer], None]:
    """An operator of two quantised tensors."""

    def write(w: Writer) -> None:
        names = w.inputs("A A_scale A_zero B B_scale B_zero C_scale C_zero")
        _rounded(w, w(kind, _real(w, *names[:3]), _real(w, *names[3:6])), *names[6:8])

    return write


def of_one(compute: Callable[[Writer, str], str]) -> Callable[[Writer], None]:
    """A function of a quantised tensor."""

    def write(w: Writer) -> None:
        x, scale, zero, y_scale, y_zero = w.inputs("X X_scale X_zero Y_scale Y_zero")
        _rounded(w, compute(w, _real(w, x, scale, zero)), y_scale, y_zero)

    return write


def _in_place(w: Writer, x: str, compute: Callable[[str], str]) -> str:
    """A pool of an image, whose channels may be last."""
    if not w.attribute("channels_last", 0):
        return compute(x)
    rank = len(w.shape(x))
    turned = w("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)])
    return str(w("Transpose", compute(turned), perm=[0, *range(2, rank), 1]))


def _pool(w: Writer, x: str) -> str:
    own = {k: v for k, v in w.given.items() if k != "channels_last"}
    return _in_place(w, x, lambda image: str(w("AveragePool", image, **own)))


def _softmax(w: Writer, x: str) -> str:
    axis = w.attribute("axis", -1) % len(w.shape(x))
    if w.attribute("opset", 13) >= 13:
        return str(w("Softmax", x, axis=axis))
    shape = w.shape(x)
    flat = w.reshape(x, int(np.prod(shape[:axis])), int(np.prod(shape[axis:])))
    return w.reshape(w("Softmax", flat, axis=1), *shape)


def _mean(w: Writer, x: str) -> str:
    axes = w.constant(w.attribute("axes", list(range(len(w.shape(x))))))
    return str(w("ReduceMean", x, axes, keepdims=w.attribute("keepdims", 1)))


def concatenation(w: Writer) -> None:
    """Quantised tensors joined."""
    names = list(w.node.input)
    parts = [_real(w, *names[i : i + 3]) for i in range(2, len(names), 3)]
    _rounded(w, w("Concat", *parts, axis=w.attribute("axis", 0)), *names[:2])


def choice(w: Writer) -> None:
    """Elements of one quantised tensor or another."""
    names = w.inputs("condition X X_scale X_zero Y Y_scale Y_zero Z_scale Z_zero")
    made = w("Where", names[0], _real(w, *names[1:4]), _real(w, *names[4:7]))
    _rounded(w, made, *names[7:9])


def gemm(w: Writer) -> None:
    """A Gemm of quantised matrices; without an output scale the result is of real numbers."""
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = w.inputs(
        "A A_scale A_zero B B_scale B_zero C y_scale y_zero"
    )
    turned = w.attribute("transB", 0)
    real = [_real(w, a, a_scale, a_zero), _real(w, b, b_scale, b_zero, axis=0 if turned else 1)]
    own = {k: w.attribute(k, d) for k, d in (("transA", 0), ("transB", 0), ("alpha", 1.0))}
    y = w("Gemm", *real, **own)
    if c:
        # The bias is of whole steps of both scales.
        steps = w("Mul", w("Mul", w.cast(c, y), a_scale), b_scale)
        y = w("Add", y, steps)
    if y_scale:
        return _rounded(w, y, y_scale, y_zero)
    return w.last("Identity", y)


def integer_product(w: Writer) -> None:
    """A product of integer matrices as real numbers."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = w.inputs(
        "A B a_scale b_scale a_zero_point b_zero_point bias"
    )
    right = _real(w, b, b_scale, b_zero, axis=len(w.shape(b)) - 1)
    product = w("MatMul", _real(w, a, a_scale, a_zero), right)
    w.last("Add", product, bias) if bias else w.last("Identity", product)


def dynamic_product(w: Writer) -> None:
    """A product with a quantised matrix of values that are rounded to eight bits first."""
    a, b, b_scale, b_zero, bias = w.inputs("A B b_scale b_zero_point bias")
    values, scale, zero = w("DynamicQuantizeLinear", a, outputs=3)
    right = _real(w, b, b_scale, b_zero, axis=len(w.shape(b)) - 1)
    product = w("MatMul", _real(w, values, scale, zero), right)
    w.last("Add", product, bias) if bias else w.last("Identity", product)


def unpacked(w: Writer, packed: str, bits: int, count: int) -> str:
    """Numbers of so many bits that bytes hold along the last dim, the lowest bits first."""
    if bits == 8:
        return packed
    shape = w.shape(packed)
    like = TensorProto.UINT8
    parts = []
    for place in range(8 // bits):
        shifted = packed
        if place:
            shift = w.constant(place * bits, like)
            shifted = w("BitShift", packed, shift, direction="RIGHT")
        low = w("BitwiseAnd", shifted, w.constant(2**bits - 1, like))
        parts.append(w("Unsqueeze", low, w.constant([len(shape)])))
    joined = w("Concat", *parts, axis=len(shape))
    flat = w.reshape(joined, *shape[:-1], shape[-1] * len(parts))
    return w.cut(flat, len(shape) - 1, 0, count)


def product_of_bits(w: Writer) -> None:
    """A product with a matrix [out, in] in blocks of few bits, each with a scale."""
    x, packed, scales, zeros, order, bias = w.inputs("A B scales zero_points g_idx bias")
    if order:
        raise w.refuse("has an order of its groups (g_idx), which is not supported")
    size = w.attribute("block_size", 32)
    bits = w.attribute("bits", 4)
    rows, columns = (w.attribute(name, 0) for name in "NK")
    blocks = -(-columns // size)
    numbers = w.cast(unpacked(w, w.reshape(packed, rows, blocks, -1), bits, size), x)
    if not zeros:
        zero = w.constant(2 ** (bits - 1), x)
    elif w.dtype(zeros) == TensorProto.UINT8:
        held = w.reshape(zeros, rows, -1)
        zero = w.reshape(w.cast(unpacked(w, held, bits, blocks), x), rows, blocks, 1)
    else:
        zero = w.reshape(zeros, rows, blocks, 1)
    centred = w("Sub", numbers, zero)
    matrix = w("Mul", centred, w.cast(w.reshape(scales, rows, blocks, 1), x))
    matrix = w.cut(w.reshape(matrix, rows, blocks * size), 1, 0, columns)
    product = w("MatMul", x, w("Transpose", matrix, perm=[1, 0]))
    w.last("Add", product, bias) if bias else w.last("Identity", product)


def packed_attention(w: Writer) -> None:
    """Attention whose first product is of integers."""
    x, weight, bias, scale, w_scale, mask, zero, w_zero, past = w.inputs(
        "input weight bias input_scale weight_scale mask_index input_zero weight_zero past"
    )
    product = w("MatMul", _real(w, x, scale, zero), _real(w, weight, w_scale, w_zero))
    attend(w, str(w("Add", product, bias)), mask, past, "")


def recurrent(w: Writer) -> None:
    """An LSTM whose matrices, [directions, in, gates], are quantised."""
    names = w.inputs("X W R B lens h c P W_scale W_zero R_scale R_zero")

    def matrix(held: str, scale: str, zero: str) -> str:
        rank = len(w.shape(scale))
        shape = [w.shape(held)[0], 1, w.shape(scale)[1] if rank == 2 else 1]
        step, start = (w.reshape(name, *shape) for name in (scale, zero))
        whole = w(
            "Sub", w("Cast", held, to=TensorProto.INT32), w("Cast", start, to=TensorProto.INT32)
        )
        real = w("Mul", w.cast(whole, scale), step)
        return str(w("Transpose", real, perm=[0, 2, 1]))

    weights = [matrix(names[1], *names[8:10]), matrix(names[2], *names[10:12])]
    count = len(w.node.output)
    own: dict[str, Any] = dict(w.given)
    made = w("LSTM", names[0], *weights, *names[3:8], outputs=count, **own)
    for place, name in enumerate(made if count > 1 else [made]):
        w.last("Identity", name, place=place)


QUANTIZED: Mapping[str, Callable[[Writer], None]] = {
    "QLinearAdd": of_two("Add"),
    "QLinearMul": of_two("Mul"),
    "QLinearSigmoid": of_one(lambda w, x: w("Sigmoid", x)),
    "QLinearLeakyRelu": of_one(lambda w, x: w("LeakyRelu", x, alpha=w.attribute("alpha", 0.01))),
    "QLinearSoftmax": of_one(_softmax),
    "QLinearAveragePool": of_one(_pool),
    "QLinearGlobalAveragePool": of_one(
        lambda w, x: _in_place(w, x, partial(w, "GlobalAveragePool"))
    ),
    "QLinearReduceMean": of_one(_mean),
    "QLinearConcat": concatenation,
    "QLinearWhere": choice,
    "QGemm": gemm,
    "MatMulIntegerToFloat": integer_product,
    "DynamicQuantizeMatMul": dynamic_product,
    "DynamicQuantizeLSTM": recurrent,
    "QAttention": packed_attention,
    "MatMulNBits": product_of_bits,
}
