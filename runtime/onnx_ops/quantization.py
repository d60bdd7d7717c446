"""Linear quantisation and products of integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .casts import to_type
from .dtypes import NARROW_INTEGERS, float_limits, torch_dtype
from .windows import convolution

Tensor = torch.Tensor


def _aligned(vector: Tensor, like: Tensor, axis: int, block_size: int) -> Tensor:
    """Scales or zero points broadcast along `axis`.

    With a `block_size` each belongs to a block of so many elements.
    """
    if vector.numel() == 1 and vector.dim() <= 1:
        return vector.reshape(())
    if vector.dim() == 1:
        shape = [1] * like.dim()
        shape[axis] = vector.numel()
        return vector.reshape(shape)
    if not block_size:
        return vector
    # The last block may be shorter than the others.
    return vector.repeat_interleave(block_size, dim=axis).narrow(axis, 0, like.shape[axis])


def dequantize(
    *,
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None = None,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    """The values (x - zero point) scale."""
    scale = _aligned(x_scale, x, axis, block_size)
    y = x.to(scale.dtype)
    if x_zero_point is not None:
        y = y - _aligned(x_zero_point, x, axis, block_size).to(scale.dtype)
    y = y * scale
    return y.to(torch_dtype(output_dtype)) if output_dtype else y


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    low, high = float_limits(dtype)
    return x.clamp(low, high).to(dtype)


_EIGHT_BITS = {
    torch.float8_e4m3fn: 17,
    torch.float8_e4m3fnuz: 18,
    torch.float8_e5m2: 19,
    torch.float8_e5m2fnuz: 20,
}


def quantize(
    *,
    x: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor | None = None,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    saturate: int = 1,
    precision: int = 0,
) -> Tensor:
    """The values round(x / scale) + zero point, saturated."""
    dtype = torch_dtype(output_dtype) if output_dtype else torch.uint8
    if y_zero_point is not None:
        dtype = y_zero_point.dtype
    y = x / _aligned(y_scale, x, axis, block_size)
    if dtype.is_floating_point:
        code = output_dtype or _EIGHT_BITS[dtype]
        return to_type(y, code, saturate=saturate)
    # Torch rounds ties to even, as ONNX asks.
    y = torch.round(y)
    if y_zero_point is not None:
        y = y + _aligned(y_zero_point, x, axis, block_size).to(y.dtype)
    # Integers of two and four bits saturate below the range of the byte that holds them.
    if output_dtype in NARROW_INTEGERS:
        return y.clamp(*NARROW_INTEGERS[output_dtype]).to(dtype)
    return _saturated(y, dtype)


def dynamic_quantize(*, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values in eight bits over their range, with the scale and zero point of that range."""
    # The range holds zero, so that padding with zeros stays exact.
    low = x.amin().clamp(max=0)
    high = x.amax().clamp(min=0)
    # Eight unsigned bits, whatever the type of the input.
    scale = (high - low) / 255
    zero = torch.round((-low / scale).clamp(0, 255))
    return _saturated(torch.round(x / scale) + zero, torch.uint8), scale, zero.to(torch.uint8)


def _centred(x: Tensor, zero_point: Tensor | None, column: bool = False) -> Tensor:
    wide = x.to(torch.int32)
    if zero_point is None:
        return wide
    zero = zero_point.to(torch.int32)
    return wide - (zero.unsqueeze(-1) if column and zero.dim() else zero)


def matmul_integer(
    *, A: Tensor, B: Tensor, a_zero_point: Tensor | None = None, b_zero_point: Tensor | None = None
) -> Tensor:
    """The product of integer matrices without their zero points."""
    return torch.matmul(_centred(A, a_zero_point, column=True), _centred(B, b_zero_point))


def quantized_matmul(
    *,
    a: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
) -> Tensor:
    """The product of quantised matrices, quantised."""
    product = matmul_integer(A=a, B=b, a_zero_point=a_zero_point, b_zero_point=b_zero_point)
    # In float64: a sum of products in 32 bits has more digits than a float32.
    factor = a_scale.to(torch.float64) * b_scale / y_scale
    y = torch.round(product.to(torch.float64) * factor) + y_zero_point.to(torch.float64)
    return _saturated(y, y_zero_point.dtype)


def _channelwise(x: Tensor, weight: Tensor) -> Tensor:
    return x.reshape(-1, *([1] * (weight.dim() - 1))) if x.dim() else x


def convolution_integer(
    *,
    x: Tensor,
    w: Tensor,
    x_zero_point: Tensor | None = None,
    w_zero_point: Tensor | None = None,
    **attributes: object,
) -> Tensor:
    """A convolution of integers without their zero points."""
    zero = None if w_zero_point is None else _channelwise(w_zero_point, w)
    # Torch convolves no integers; float64 holds every sum of their products exactly.
    values = _centred(x, x_zero_point).to(torch.float64)
    weights = _centred(w, zero).to(torch.float64)
    return convolution(X=values, W=weights, **attributes).to(torch.int32)  # type: ignore[arg-type]


def quantized_convolution(
    *,
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
    B: Tensor | None = None,
    **attributes: object,
) -> Tensor:
    """A convolution of quantised tensors, quantised."""
    y = convolution_integer(
        x=x, w=w, x_zero_point=x_zero_point, w_zero_point=w_zero_point, **attributes
    ).to(torch.float64)
    channels = (1, -1, *([1] * (w.dim() - 2)))
    y = y if B is None else y + B.to(torch.float64).reshape(channels)
    scale = w_scale.reshape(channels) if w_scale.dim() else w_scale
    factor = x_scale.to(torch.float64) * scale / y_scale
    y = torch.round(y * factor) + y_zero_point.to(torch.float64)
    return _saturated(y, y_zero_point.dtype)


FUNCTIONS: Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "QuantizeLinear": quantize,
    "DequantizeLinear": dequantize,
    "DynamicQuantizeLinear": dynamic_quantize,
    "MatMulInteger": matmul_integer,
    "QLinearMatMul": quantized_matmul,
    "ConvInteger": convolution_integer,
    "QLinearConv": quantized_convolution,
}
