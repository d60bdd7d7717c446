"""Linear quantisation and products of integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .casts import saturated, to_type
from .symbols import Symbol
from .trace import CODES, Asked
from .windows import convolution


def _aligned(vector: Symbol, like: Symbol, axis: int, block_size: int) -> Symbol:
    """Scales or zero points broadcast along `axis`.

    With a `block_size` each belongs to a block of so many elements.
    """
    if vector.size == 1 and vector.rank <= 1:
        return vector.reshape()
    axis %= like.rank
    if vector.rank == 1:
        return vector.reshape(*[vector.size if i == axis else 1 for i in range(like.rank)])
    if not block_size:
        return vector
    # The last block may be shorter than the others.
    return vector.repeat_interleave(block_size, axis).cut(axis, 0, like.shape[axis])


def dequantize(
    *,
    x: Symbol,
    x_scale: Symbol,
    x_zero_point: Symbol | None = None,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Symbol:
    """The values (x - zero point) scale."""
    scale = _aligned(x_scale, x, axis, block_size)
    y = x.to(scale.dtype)
    if x_zero_point is not None:
        y = y - _aligned(x_zero_point, x, axis, block_size).to(scale.dtype)
    y = y * scale
    return to_type(y, output_dtype) if output_dtype else y


def quantize(
    asked: Asked,
    *,
    x: Symbol,
    y_scale: Symbol,
    y_zero_point: Symbol | None = None,
    axis: int = 1,
    block_size: int = 0,
    saturate: int = 1,
    **_: object,
) -> Symbol:
    """The values round(x / scale) + zero point, saturated."""
    y = x / _aligned(y_scale, x, axis, block_size)
    if Symbol(asked.trace, asked.outputs[0]).floating:
        return to_type(y, asked.code, saturate=saturate)
    # Torch rounds ties to even, as ONNX asks.
    y = y.map("round")
    if y_zero_point is not None:
        y = y + _aligned(y_zero_point, x, axis, block_size).to(y.dtype)
    return saturated(y, asked.code)


def dynamic_quantize(*, x: Symbol) -> tuple[Symbol, Symbol, Symbol]:
    """The values in eight bits over their range, with the scale and zero point of that range."""
    # The range holds zero, so that padding with zeros stays exact.
    every = tuple(range(x.rank))
    low = x.amin(*every).clamp(high=0)
    high = x.amax(*every).clamp(low=0)
    # Eight unsigned bits, whatever the type of the input.
    scale = (high - low) / 255
    zero = (-low / scale).clamp(0, 255).map("round")
    code = CODES["uint8"]
    return saturated((x / scale).map("round") + zero, code), scale, zero.to("uint8")


def _centred(x: Symbol, zero_point: Symbol | None, column: bool = False) -> Symbol:
    wide = x.to("int32")
    if zero_point is None:
        return wide
    zero = zero_point.to("int32")
    return wide - (zero.unsqueeze(-1) if column and zero.rank else zero)


def matmul_integer(
    *, A: Symbol, B: Symbol, a_zero_point: Symbol | None = None, b_zero_point: Symbol | None = None
) -> Symbol:
    """The product of integer matrices without their zero points."""
    return _centred(A, a_zero_point, column=True) @ _centred(B, b_zero_point)


def _requantized(y: Symbol, factor: Symbol, zero_point: Symbol) -> Symbol:
    # In float64: a sum of products in 32 bits has more digits than a float32.
    y = (y.to("float64") * factor).map("round") + zero_point.to("float64")
    return saturated(y, zero_point.val.dtype)


def quantized_matmul(
    *,
    a: Symbol,
    a_scale: Symbol,
    a_zero_point: Symbol,
    b: Symbol,
    b_scale: Symbol,
    b_zero_point: Symbol,
    y_scale: Symbol,
    y_zero_point: Symbol,
) -> Symbol:
    """The product of quantised matrices, quantised."""
    product = matmul_integer(A=a, B=b, a_zero_point=a_zero_point, b_zero_point=b_zero_point)
    factor = a_scale.to("float64") * b_scale.to("float64") / y_scale.to("float64")
    return _requantized(product, factor, y_zero_point)


def _channelwise(x: Symbol, weight: Symbol) -> Symbol:
    return x.reshape(-1, *([1] * (weight.rank - 1))) if x.rank else x


def convolution_integer(
    *,
    x: Symbol,
    w: Symbol,
    x_zero_point: Symbol | None = None,
    w_zero_point: Symbol | None = None,
    **attributes: object,
) -> Symbol:
    """A convolution of integers without their zero points."""
    zero = None if w_zero_point is None else _channelwise(w_zero_point, w)
    # Torch convolves no integers; float64 holds every sum of their products exactly.
    values = _centred(x, x_zero_point).to("float64")
    weights = _centred(w, zero).to("float64")
    return convolution(X=values, W=weights, **attributes).to("int32")  # type: ignore[arg-type]


def quantized_convolution(
    *,
    x: Symbol,
    x_scale: Symbol,
    x_zero_point: Symbol,
    w: Symbol,
    w_scale: Symbol,
    w_zero_point: Symbol,
    y_scale: Symbol,
    y_zero_point: Symbol,
    B: Symbol | None = None,
    **attributes: object,
) -> Symbol:
    """A convolution of quantised tensors, quantised."""
    y = convolution_integer(
        x=x, w=w, x_zero_point=x_zero_point, w_zero_point=w_zero_point, **attributes
    ).to("float64")
    channels = (1, -1, *([1] * (w.rank - 2)))
    y = y if B is None else y + B.to("float64").reshape(*channels)
    scale = w_scale.reshape(*channels) if w_scale.rank else w_scale
    factor = x_scale.to("float64") * scale.to("float64") / y_scale.to("float64")
    return _requantized(y, factor, y_zero_point)


FUNCTIONS: Mapping[str, Callable[..., Symbol | tuple[Symbol, ...]]] = {
    "DequantizeLinear": dequantize,
    "DynamicQuantizeLinear": dynamic_quantize,
    "MatMulInteger": matmul_integer,
    "QLinearMatMul": quantized_matmul,
    "ConvInteger": convolution_integer,
    "QLinearConv": quantized_convolution,
}
ASKING: Mapping[str, Callable[..., Symbol]] = {"QuantizeLinear": quantize}
