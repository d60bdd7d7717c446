"""Numbers of several distributions from random bits by counter, for any part of a tensor.

Floats of [0, 1) have as many bits as torch draws for their type; the others follow by inverse
transforms, normal ones by Box and Muller's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .counter_bits import Key, Region, bits, blocks, matrix_of
from .draw_state import Draws

_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True, slots=True)
class Source:
    """An operator's draws in a step, for its part of a tensor.

    `stream` numbers the draws if there are several.
    """

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
        for rows, columns, block in blocks(self.key(stream), self.region):
            # The bits are signed numbers: the threshold is shifted as they are.
            torch.lt(block, least - 2**31, out=matrix[rows, columns])
        return out

    def uniform(self, dtype: torch.dtype = torch.float32, *, stream: int = 0) -> Tensor:
        """Uniform numbers of at least 0 and below 1."""
        if dtype == torch.float64:
            return self._double(stream)
        digits = _DIGITS[dtype]
        out = torch.empty(self.region.shape, dtype=dtype, device=self.region.device)
        matrix = matrix_of(out, self.region)
        for rows, columns, block in blocks(self.key(stream), self.region):
            # Signed numbers lie around zero: half is added after the scaling.
            floats = block.bitwise_right_shift_(32 - digits) * 2.0**-digits
            matrix[rows, columns] = floats.add_(0.5)
        return out

    def _double(self, stream: int) -> Tensor:
        """The upper 32 bits from one draw, the lower 21 from another."""
        upper = bits(self.key(stream), self.region)
        # Complements are numbers that no other draw of the operator has.
        lower = bits(self.key(~stream), self.region)
        low = lower.bitwise_right_shift_(11).bitwise_and_(2**21 - 1).to(torch.float64)
        return upper.to(torch.float64).add_(2**31).mul_(2.0**-32).add_(low, alpha=2.0**-53)

    def exponential(self, dtype: torch.dtype = torch.float32, *, stream: int = 0) -> Tensor:
        """Numbers of the exponential distribution of rate 1."""
        return self.uniform(_computed_in(dtype), stream=stream).neg_().log1p_().neg_().to(dtype)

    def normal(self, dtype: torch.dtype = torch.float32, *, stream: int = 0) -> Tensor:
        """Normal numbers of mean 0 and variance 1; uses the next stream as well."""
        # Box and Muller: the length and the angle of a normal vector in the plane, of which one
        # coordinate is used.
        inner = _computed_in(dtype)
        length = self.exponential(inner, stream=stream).mul_(2).sqrt_()
        angle = self.uniform(inner, stream=stream + 1).mul_(2 * math.pi)
        return length.mul_(angle.cos_()).to(dtype)

    def integers(self, low: int, high: int, *, stream: int = 0) -> Tensor:
        """Whole numbers (int64) from `low` to below `high`; uses the next stream as well."""
        upper = bits(self.key(stream), self.region).to(torch.int64)
        lower = bits(self.key(stream + 1), self.region).to(torch.int64)
        # 63 bits without a sign, so that the remainder is never negative.
        upper.bitwise_and_(2**31 - 1).bitwise_left_shift_(32)
        numbers = upper.add_(lower.bitwise_and_(2**32 - 1))
        if high - low < 2**63:
            numbers.remainder_(high - low)
        return numbers.add_(low)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which transforms are computed: 16 bits would lose the tails."""
    return dtype if dtype == torch.float64 else torch.float32
