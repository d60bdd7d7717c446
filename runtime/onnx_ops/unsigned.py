"""Arithmetic on the unsigned integers that torch stores but does not compute with.

They become 64 signed bits and go back. In 64 bits the wrapped sum, difference and product are the
same bits signed or not; the order is that of the values with the top bit flipped; a quotient by b
is twice that of half the dividend, or one more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor
Function = Callable[..., Tensor]
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_TOP_BIT = torch.iinfo(torch.int64).min


def to_signed(x: Tensor) -> Tensor:
    """The same values in 64 signed bits, those beyond 2^63 wrapped."""
    return x.view(torch.int64) if x.dtype == torch.uint64 else x.to(torch.int64)


def from_signed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Unsigned values from 64 signed bits; overflow wraps."""
    return x.view(torch.uint64) if dtype == torch.uint64 else x.to(dtype)


def _to_ordered(x: Tensor) -> Tensor:
    """Signed values in the order of the unsigned ones."""
    return to_signed(x) ^ _TOP_BIT if x.dtype == torch.uint64 else x.to(torch.int64)


def wrapping(function: Function) -> Function:
    """`function`, a sum, product or bitwise operator, for unsigned tensors too."""

    def call(first: Tensor, *rest: Tensor) -> Tensor:
        if first.dtype not in UNSIGNED:
            return function(first, *rest)
        return from_signed(function(to_signed(first), *map(to_signed, rest)), first.dtype)

    return call


def comparing(function: Function) -> Function:
    """`function`, a comparison, for unsigned tensors too."""

    def call(a: Tensor, b: Tensor) -> Tensor:
        return function(_to_ordered(a), _to_ordered(b)) if a.dtype in UNSIGNED else function(a, b)

    return call


def choosing(function: Function) -> Function:
    """`function`, which returns some of the values passed to it, for unsigned tensors too."""

    def call(first: Tensor, *rest: Tensor, **options: object) -> Tensor:
        if first.dtype not in UNSIGNED:
            return function(first, *rest, **options)
        chosen = function(_to_ordered(first), *map(_to_ordered, rest), **options)
        if first.dtype == torch.uint64:
            chosen = chosen ^ _TOP_BIT
        return from_signed(chosen, first.dtype)

    return call


def divide(a: Tensor, b: Tensor) -> Tensor:
    """The quotient rounded towards zero."""
    if a.dtype not in UNSIGNED:
        return torch.div(a, b, rounding_mode="trunc")
    if a.dtype != torch.uint64:
        return torch.div(a.to(torch.int64), b.to(torch.int64), rounding_mode="trunc").to(a.dtype)
    x = to_signed(a)
    y = to_signed(b)
    # The shift keeps the sign bit, which the mask takes away: half of the unsigned value.
    half = torch.bitwise_right_shift(x, 1) & torch.iinfo(torch.int64).max
    quotient = torch.div(half, y.clamp(min=1), rounding_mode="trunc") * 2
    rest = x - quotient * y
    quotient = quotient + ((rest ^ _TOP_BIT) >= (y ^ _TOP_BIT))
    # A divisor beyond 2^63 goes into any value once at most.
    once = ((x ^ _TOP_BIT) >= (y ^ _TOP_BIT)).to(torch.int64)
    return torch.where(y < 0, once, quotient).view(torch.uint64)


def remainder(a: Tensor, b: Tensor) -> Tensor:
    """The remainder of `a` after division by `b`."""
    if a.dtype not in UNSIGNED:
        return torch.remainder(a, b)
    return from_signed(to_signed(a) - to_signed(divide(a, b)) * to_signed(b), a.dtype)
