"""Arithmetic on the unsigned integers that torch stores but does not compute with.

They become 64 signed bits and go back. In 64 bits the wrapped sum, difference and product are the
same bits signed or not; the order is that of the values with the top bit flipped; a quotient by b
is twice that of half the dividend, or one more.
"""

from __future__ import annotations

from collections.abc import Callable

from .symbols import Symbol, where

Function = Callable[..., Symbol]
UNSIGNED = ("uint16", "uint32", "uint64")
_TOP_BIT = -(2**63)
_ALL_BUT_TOP = 2**63 - 1


def _viewed(x: Symbol, dtype: str) -> Symbol:
    return x.new("view.dtype", None, dtype, self=x, dtype=dtype)


def to_signed(x: Symbol) -> Symbol:
    """The same values in 64 signed bits, those beyond 2^63 wrapped."""
    return _viewed(x, "int64") if x.dtype == "uint64" else x.to("int64")


def from_signed(x: Symbol, dtype: str) -> Symbol:
    """Unsigned values from 64 signed bits; overflow wraps."""
    return _viewed(x, "uint64") if dtype == "uint64" else x.to(dtype)


def _flipped(x: Symbol) -> Symbol:
    return x.with_other("bitwise_xor.Scalar", _TOP_BIT)


def _to_ordered(x: Symbol) -> Symbol:
    """Signed values in the order of the unsigned ones."""
    return _flipped(to_signed(x)) if x.dtype == "uint64" else to_signed(x)


def wrapping(function: Function) -> Function:
    """`function`, a sum, product or bitwise operator, for unsigned tensors too."""

    def call(first: Symbol, *rest: Symbol) -> Symbol:
        if first.dtype not in UNSIGNED:
            return function(first, *rest)
        return from_signed(function(to_signed(first), *map(to_signed, rest)), first.dtype)

    return call


def comparing(function: Function) -> Function:
    """`function`, a comparison, for unsigned tensors too."""

    def call(a: Symbol, b: Symbol) -> Symbol:
        return function(_to_ordered(a), _to_ordered(b)) if a.dtype in UNSIGNED else function(a, b)

    return call


def choosing(function: Function) -> Function:
    """`function`, which returns some of the values passed to it, for unsigned tensors too."""

    def call(first: Symbol, *rest: Symbol, **options: object) -> Symbol:
        if first.dtype not in UNSIGNED:
            return function(first, *rest, **options)
        chosen = function(_to_ordered(first), *map(_to_ordered, rest), **options)
        if first.dtype == "uint64":
            chosen = _flipped(chosen)
        return from_signed(chosen, first.dtype)

    return call


def truncated(a: Symbol, b: Symbol | int) -> Symbol:
    """The quotient of signed integers, rounded towards zero."""
    return a.with_other("div.Tensor_mode", b, rounding_mode="trunc")


def divide(a: Symbol, b: Symbol) -> Symbol:
    """The quotient rounded towards zero."""
    if a.dtype not in UNSIGNED:
        return truncated(a, b)
    x, y = to_signed(a), to_signed(b)
    if a.dtype != "uint64":
        return truncated(x, y).to(a.dtype)
    # The shift keeps the sign bit, which the mask takes away: half of the unsigned value.
    half = x.with_other("bitwise_right_shift.Tensor_Scalar", 1)
    half = half.with_other("bitwise_and.Scalar", _ALL_BUT_TOP)
    quotient = truncated(half, y.clamp(1)) * 2
    rest = x - quotient * y
    quotient = quotient + (_flipped(rest) >= _flipped(y)).to("int64")
    # A divisor beyond 2^63 goes into any value once at most.
    once = (_flipped(x) >= _flipped(y)).to("int64")
    return from_signed(where(y < 0, once, quotient), "uint64")


def remainder(a: Symbol, b: Symbol) -> Symbol:
    """The remainder of `a` after division by `b`, of the sign of `b`."""
    if a.dtype not in UNSIGNED:
        return a.with_other("remainder.Tensor", b)
    return from_signed(to_signed(a) - to_signed(divide(a, b)) * to_signed(b), a.dtype)
