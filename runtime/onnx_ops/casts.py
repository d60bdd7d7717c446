"""Casts between element types, those narrower than a byte among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .dtypes import FLOAT4, FLOAT8_SCALE, NARROW_INTEGERS, float_limits, torch_dtype

Tensor = torch.Tensor
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
# Halfway between the largest e4m3fn, 448, and the next number of its spacing.
_OVERFLOW = 464.0


def _to_float4(x: Tensor) -> Tensor:
    """The nearest of 0, 1/2, 1, 3/2, 2, 3, 4 and 6, ties to even; not a number becomes zero."""
    x = torch.nan_to_num(x.float(), nan=0.0).clamp(-6, 6)
    # The spacing of e2m1 doubles with each power of two; torch rounds ties to even.
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return (torch.round(x / step) * step).to(torch.float8_e4m3fn)


def _to_scale(x: Tensor, saturate: int, round_mode: str) -> Tensor:
    """The exponent alone of the magnitude, rounded up, down, or to the nearer power of two."""
    # The sign bit is dropped: a scale has an exponent of eight bits and nothing else.
    bits = x.float().view(torch.int32) & 0x7FFFFFFF
    exponent = bits >> 23
    fraction = bits & 0x7FFFFF
    half = 1 << 22
    away = {
        "up": fraction > 0,
        "down": fraction < 0,
        "nearest": (fraction > half) | ((fraction == half) & (exponent > 0)),
    }[round_mode]
    if saturate:
        # 254 is the largest finite exponent; 255 is NaN.
        away = away & (exponent < 254)
    rounded = torch.where(exponent == 255, exponent, exponent + away).clamp(max=255)
    return rounded.to(torch.uint8).view(torch.float8_e8m0fnu)


def to_type(x: Tensor, code: int, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """The same values in the ONNX element type `code`."""
    dtype = torch_dtype(code)
    if code == FLOAT4:
        return _to_float4(x)
    if code == FLOAT8_SCALE:
        return _to_scale(x, saturate, round_mode)
    if code in NARROW_INTEGERS:
        low, high = NARROW_INTEGERS[code]
        # Integers wrap around, as a cast of wider ones in C does.
        span = high - low + 1
        return ((x.to(torch.int64) - low) % span + low).to(dtype)
    if dtype not in _EIGHT_BITS:
        return x.to(dtype)
    x = x.float()
    if saturate:
        # Infinities saturate as well; NaN stays.
        low_float, high_float = float_limits(dtype)
        return torch.where(x.isnan(), x, x.clamp(low_float, high_float)).to(dtype)
    if dtype == torch.float8_e4m3fn:
        # This type has no infinity, and torch would saturate: ONNX asks for NaN.
        x = torch.where(x.abs() > _OVERFLOW, torch.nan, x)
    return x.to(dtype)


def cast(*, input: Tensor, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """The same values in another dtype."""
    return to_type(input, to, saturate=saturate, round_mode=round_mode)


def bit_cast(*, input: Tensor, to: int) -> Tensor:
    """The same bits read as another dtype of the same width."""
    return input.view(torch_dtype(to))


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {"Cast": cast, "BitCast": bit_cast}
