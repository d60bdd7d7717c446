"""Floats of 16 bits with 6 bits of exponent, for the moments of an optimizer.

Their bits are 1-6-9 (sign, exponent, mantissa) for means and 0-6-10 for variances, as DALL-E kept
Adam's moments (Ramesh et al., arXiv:2102.12092). A code has the fields of IEEE 754, with a bias of
31 and M bits of mantissa:

    exponent e > 0    (-1)^s 2^(e - 31) (1 + f / 2^M)    e = 63 is an ordinary number: there are
                                                         no infinities
    exponent 0        (-1)^s 2^(-30) f / 2^M             zero, and numbers below 2^-30 with less
                                                         precision

A number is rounded to the nearest code, halves to the even one. Beyond the largest it becomes the
largest, and below half of the smallest it becomes zero. 0-6-10 has no sign: negative numbers become
zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXPONENTS = 6
BIAS = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniFloat:
    """A format: whether it has a sign, and its bits of mantissa."""

    signed: bool
    mantissa: int

    def __str__(self) -> str:
        return f"{int(self.signed)}-{EXPONENTS}-{self.mantissa}"

    @property
    def largest(self) -> float:
        """The largest number."""
        return float(2.0 ** (2**EXPONENTS - 1 - BIAS) * (2 - 2.0**-self.mantissa))

    @property
    def smallest(self) -> float:
        """The smallest number above zero; below 2^-30 all are multiples of it."""
        return float(2.0 ** (1 - BIAS - self.mantissa))

    def encode(self, value: Tensor) -> Tensor:
        """The codes of numbers, as int16."""
        size = (value.abs() if self.signed else value.clamp(min=0)).clamp(max=self.largest)
        fraction, exponent = torch.frexp(size)
        # frexp has fractions from 0.5 to 1, where IEEE 754 has them from 1 to 2.
        field = exponent + (BIAS - 1)
        normal = (
            torch.round(torch.ldexp(fraction, torch.tensor(self.mantissa + 1))).to(torch.int32)
            - 2**self.mantissa
        )
        code = (
            field << self.mantissa
        ) + normal  # rounding up to the next power of two carries into the exponent
        low = torch.round(size.clamp(max=2.0 ** (1 - BIAS)) / self.smallest).to(torch.int32)
        code = torch.where(field < 1, low, code).clamp(max=2 ** (EXPONENTS + self.mantissa) - 1)
        code = torch.where(size == 0, torch.zeros_like(code), code)
        if self.signed:
            code = code | (torch.signbit(value).to(torch.int32) << 15)
        # torch computes little in uint16, so the same 16 bits are kept as a signed number.
        return torch.where(code >= 2**15, code - 2**16, code).to(torch.int16)

    def decode(self, code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers of codes."""
        # The cast has copied the sign bit of int16 into the upper half.
        bits = code.to(torch.int32) & 0xFFFF
        field = (bits >> self.mantissa) & (2**EXPONENTS - 1)
        rest = bits & (2**self.mantissa - 1)
        whole = torch.where(field > 0, rest + 2**self.mantissa, rest).to(dtype)
        size = torch.ldexp(whole, field.clamp(min=1) - (BIAS + self.mantissa))
        return torch.where((bits >> 15).bool(), -size, size) if self.signed else size


MEAN = MiniFloat(signed=True, mantissa=9)
"""1-6-9."""
VARIANCE = MiniFloat(signed=False, mantissa=10)
"""0-6-10."""
