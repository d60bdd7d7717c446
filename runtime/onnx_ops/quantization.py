"""Linear quantisation and products of integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .casts import to_type
from .dtypes import NARROW_INTEGERS, float_limits, torch_dtype
from .windows import convolution

Tensor = torch.Tensor


def _aligned(vector: Tensor, like: Tensor, axis: int, block_size: int) -> Tensor:
    """Scales or zero points broadcast along `axis`, one a block of elements where `block_size` says so."""
    if vector.numel() == 1 and vector.dim() <= 1:
        return vector.reshape(())
    if vector.dim() == 1:
        shape = [1] * like.dim()
        shape[axis] = vector.numel()
        return vector.reshape(shape)
    return vector.repeat_interleave(block_size, dim=axis).narrow(axis, 0, like.shape[axis]) if block_size else vector


def dequantize(
    *, x: Tensor, x_scale: Tensor, x_zero_point: Tensor | None = None, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Tensor:
    """(x - zero point) scale."""
    scale = _aligned(x_scale, x, axis, block_size)
    y = x.to(scale.dtype)
    if x_zero_point is not None:
        y = y - _aligned(x_zero_point, x, axis, block_size).to(scale.dtype)
    y = y * scale
    return y.to(torch_dtype(output_dtype)) if output_dtype else y


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    low, high = float_limits(dtype)
    return x.clamp(low, high).to(dtype)


_EIGHT_BITS = {torch.float8_e4m3fn: 17, torch.float8_e4m3fnuz: 18, torch.float8_e5m2: 19, torch.float8_e5m2fnuz: 20}


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
    """round(x / scale) + zero point, saturated."""
    dtype = y_zero_point.dtype if y_zero_point is not None else (torch_dtype(output_dtype) if output_dtype else torch.uint8)
    y = x / _aligned(y_scale, x, axis, block_size)
    if dtype.is_floating_point:
        code = output_dtype or _EIGHT_BITS[dtype]
        return to_type(y, code, saturate=saturate)
    y = torch.round(y)
    if y_zero_point is not None:
        y = y + _aligned(y_zero_point, x, axis, block_size).to(y.dtype)
    return y.clamp(*NARROW_INTEGERS[output_dtype]).to(dtype) if output_dtype in NARROW_INTEGERS else _saturated(y, dtype)


def dynamic_quantize(*, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eight bits over the range of the values, with the scale and zero point found."""
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    zero = torch.round((-low / scale).clamp(0, 255))
    return _saturated(torch.round(x / scale) + zero, torch.uint8), scale, zero.to(torch.uint8)


def _centred(x: Tensor, zero_point: Tensor | None, column: bool = False) -> Tensor:
    wide = x.to(torch.int32)
    if zero_point is None:
        return wide
    zero = zero_point.to(torch.int32)
    return wide - (zero.unsqueeze(-1) if column and zero.dim() else zero)


def matmul_integer(*, A: Tensor, B: Tensor, a_zero_point: Tensor | None = None, b_zero_point: Tensor | None = None) -> Tensor:
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
    product = matmul_integer(A=a, B=b, a_zero_point=a_zero_point, b_zero_point=b_zero_point).to(torch.float64)
    y = torch.round(product * (a_scale.to(torch.float64) * b_scale / y_scale)) + y_zero_point.to(torch.float64)
    return _saturated(y, y_zero_point.dtype)


def _channelwise(x: Tensor, weight: Tensor) -> Tensor:
    return x.reshape(-1, *([1] * (weight.dim() - 1))) if x.dim() else x


def convolution_integer(
    *, x: Tensor, w: Tensor, x_zero_point: Tensor | None = None, w_zero_point: Tensor | None = None, **attributes: object
) -> Tensor:
    """A convolution of integers without their zero points."""
    left = _centred(x, x_zero_point).to(torch.float64)
    right = _centred(w, None if w_zero_point is None else _channelwise(w_zero_point, w)).to(torch.float64)
    return convolution(X=left, W=right, **attributes).to(torch.int32)  # type: ignore[arg-type]


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
    y = convolution_integer(x=x, w=w, x_zero_point=x_zero_point, w_zero_point=w_zero_point, **attributes).to(torch.float64)
    y = y if B is None else y + B.to(torch.float64).reshape(1, -1, *([1] * (w.dim() - 2)))
    scale = w_scale.reshape(1, -1, *([1] * (w.dim() - 2))) if w_scale.dim() else w_scale
    y = torch.round(y * (x_scale.to(torch.float64) * scale / y_scale)) + y_zero_point.to(torch.float64)
    return _saturated(y, y_zero_point.dtype)


FUNCTIONS: Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "QuantizeLinear": quantize, "DequantizeLinear": dequantize, "DynamicQuantizeLinear": dynamic_quantize, "MatMulInteger": matmul_integer,
    "QLinearMatMul": quantized_matmul, "ConvInteger": convolution_integer, "QLinearConv": quantized_convolution,
}  # fmt: skip
