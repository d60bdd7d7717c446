"""Numbers of several distributions from random bits by counter, for any part of a tensor.

Floats of [0, 1) have as many bits as torch draws for their type; the others follow by inverse transforms, normal ones
by Box and Muller's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .draws import Draws
from .random_bits import Key, Region, bits, blocks, matrix_of

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True, slots=True)
class Source:
    """An operator's draws in a step, for its part of a tensor; `stream` numbers its draws if there are several."""

    draws: Draws
    operator: int
    region: Region

    def key(self, stream: int = 0) -> Key:
        """The key of this draw."""
        return Key.of(self.draws, self.operator, stream)

    def chosen(self, rate: float, *, stream: int = 0) -> Tensor:
        """Booleans, of which the share `rate` is true."""
        out = torch.empty(self.region.shape, dtype=torch.bool, device=self.region.device)
        least = round(min(max(rate, 0.0), 1.0) * 2**32)
        if least in (0, 2**32):
            return out.fill_(least > 0)
        matrix = matrix_of(out, self.region)
        for rows, columns, found in blocks(self.key(stream), self.region):
            torch.lt(found, least - 2**31, out=matrix[rows, columns])
        return out

    def uniform(self, dtype: torch.dtype = torch.float32, *, stream: int = 0) -> Tensor:
        """Uniform numbers of at least 0 and below 1."""
        if dtype == torch.float64:
            return self._double(stream)
        digits = _DIGITS[dtype]
        out = torch.empty(self.region.shape, dtype=dtype, device=self.region.device)
        matrix = matrix_of(out, self.region)
        for rows, columns, found in blocks(self.key(stream), self.region):
            floats = found.bitwise_right_shift_(32 - digits) * 2.0**-digits
            matrix[rows, columns] = floats.add_(0.5)
        return out

    def _double(self, stream: int) -> Tensor:
        """The upper 32 bits from one draw, the lower 21 from another."""
        upper, lower = (bits(self.key(number), self.region) for number in (stream, ~stream))
        low = lower.bitwise_right_shift_(11).bitwise_and_(2**21 - 1).to(torch.float64)
        return upper.to(torch.float64).add_(2**31).mul_(2.0**-32).add_(low, alpha=2.0**-53)

    def exponential(self, dtype: torch.dtype = torch.float32, *, stream: int = 0) -> Tensor:
        """Numbers of the exponential distribution of rate 1."""
        return self.uniform(_computed_in(dtype), stream=stream).neg_().log1p_().neg_().to(dtype)

    def normal(self, dtype: torch.dtype = torch.float32, *, stream: int = 0) -> Tensor:
        """Normal numbers of mean 0 and variance 1; uses the next stream as well."""
        inner = _computed_in(dtype)
        length = self.exponential(inner, stream=stream).mul_(2).sqrt_()
        return length.mul_(self.uniform(inner, stream=stream + 1).mul_(2 * math.pi).cos_()).to(dtype)

    def integers(self, low: int, high: int, *, stream: int = 0) -> Tensor:
        """Whole numbers (int64) from `low` to below `high`; uses the next stream as well."""
        upper, lower = (bits(self.key(number), self.region).to(torch.int64) for number in (stream, stream + 1))
        found = upper.bitwise_and_(2**31 - 1).bitwise_left_shift_(32).add_(lower.bitwise_and_(2**32 - 1))
        return (found if high - low >= 2**63 else found.remainder_(high - low)).add_(low)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
