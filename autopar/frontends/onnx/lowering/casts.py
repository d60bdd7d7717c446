"""Casts between element types, those narrower than a byte among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autopar.frontends.onnx.values import dtype_name

from .elementwise import limits
from .symbols import Symbol, where
from .trace import Asked

FLOAT4 = 23
FLOAT8_SCALE = 24
NARROW_INTEGERS: Mapping[int, tuple[int, int]] = {21: (0, 15), 22: (-8, 7), 25: (0, 3), 26: (-2, 1)}
"""The range of the integers that are narrower than the type they are held in, by ONNX number."""
_EIGHT_BITS: Mapping[str, float] = {
    "float8_e4m3fn": 448.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2": 57344.0,
    "float8_e5m2fnuz": 57344.0,
}
"""The largest number of each."""
_OVERFLOW = 464.0
"""Halfway between the largest e4m3fn, 448, and the next number of its spacing."""


def _to_float4(x: Symbol) -> Symbol:
    """The nearest of 0, 1/2, 1, 3/2, 2, 3, 4 and 6, ties to even; not a number becomes zero."""
    x = x.to("float32").map("nan_to_num", nan=0.0).clamp(-6, 6)
    # The spacing of e2m1 doubles with each power of two; torch rounds ties to even.
    size = x.map("abs")
    step = (size >= 2).to("float32") * 0.5 + (size >= 4).to("float32") + 0.5
    return ((x / step).map("round") * step).to("float8_e4m3fn")


def _to_scale(x: Symbol, saturate: int, round_mode: str) -> Symbol:
    """The exponent alone of the magnitude, rounded up, down, or to the nearer power of two."""
    x = x.to("float32")
    bits = x.new("view.dtype", None, "int32", self=x, dtype="int32")
    # The sign bit is dropped: a scale has an exponent of eight bits and nothing else.
    bits = bits.with_other("bitwise_and.Scalar", 0x7FFFFFFF)
    exponent = bits.with_other("bitwise_right_shift.Tensor_Scalar", 23)
    fraction = bits.with_other("bitwise_and.Scalar", 0x7FFFFF)
    half = 1 << 22
    if round_mode == "nearest":
        away = (fraction > half) | (fraction.equals(half) & (exponent > 0))
    else:
        away = fraction > 0 if round_mode == "up" else fraction < 0
    if saturate:
        # 254 is the largest finite exponent; 255 is NaN.
        away = away & (exponent < 254)
    rounded = where(exponent.equals(255), exponent, exponent + away.to("int32")).clamp(high=255)
    byte = rounded.to("uint8")
    return byte.new("view.dtype", None, "float8_e8m0fnu", self=byte, dtype="float8_e8m0fnu")


def to_type(x: Symbol, code: int, *, saturate: int = 1, round_mode: str = "up") -> Symbol:
    """The same values in the ONNX element type `code`."""
    dtype = dtype_name(code, f"a cast of {x.val.name!r}")
    if code == FLOAT4:
        return _to_float4(x)
    if code == FLOAT8_SCALE:
        return _to_scale(x, saturate, round_mode)
    if code in NARROW_INTEGERS:
        low, high = NARROW_INTEGERS[code]
        # Integers wrap around, as a cast of wider ones in C does.
        wide = (x.to("int64") - low).with_other("remainder.Scalar", high - low + 1)
        return (wide + low).to(dtype)
    if dtype not in _EIGHT_BITS:
        return x.to(dtype)
    x = x.to("float32")
    if saturate:
        # Infinities saturate as well; NaN stays.
        return x.clamp(-_EIGHT_BITS[dtype], _EIGHT_BITS[dtype]).to(dtype)
    if dtype == "float8_e4m3fn":
        # This type has no infinity, and torch would saturate: ONNX asks for NaN.
        x = x.masked_fill(x.map("abs") > _OVERFLOW, float("nan"))
    return x.to(dtype)


def saturated(x: Symbol, code: int) -> Symbol:
    """Whole numbers in an integer type; those beyond its range become its ends."""
    dtype = dtype_name(code, f"a cast of {x.val.name!r}")
    return x.clamp(*NARROW_INTEGERS.get(code, limits(dtype))).to(dtype)


def bit_cast(*, input: Symbol, to: int) -> Symbol:
    """The same bits read as another type of the same width."""
    dtype = dtype_name(to, f"a cast of {input.val.name!r}")
    return input.new("view.dtype", None, dtype, self=input, dtype=dtype)


def cast_like(asked: Asked, *, input: Symbol, target_type: Symbol, **options: Any) -> Symbol:
    """The same values in the type of another tensor."""
    return to_type(input, asked.code, **options)


FUNCTIONS: Mapping[str, Callable[..., Symbol]] = {
    "Cast": lambda *, input, to, **options: to_type(input, to, **options),
    "BitCast": bit_cast,
}
ASKING: Mapping[str, Callable[..., Symbol]] = {"CastLike": cast_like}
