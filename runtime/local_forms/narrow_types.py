"""Tensors rounded to types of 8 bits or fewer, and brought back (`autopar.ir.recipes`).

    s = max |x| of a block / most,   q = round(x / s),   x ~ s q

Products of such tensors are made in float32 at least, so that they are those of kernels that add
up narrow products exactly.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from autopar.ir.recipes import Recipe

Blocks = tuple[int, int]
"""Rows and columns of a block; 0: all of them."""
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of e2m1 by their codes."""
_BETWEEN = tuple((low + high) / 2 for low, high in itertools.pairwise(_NUMBERS))
_SIGN = 8
FLOAT4 = "float4_e2m1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """A rounded tensor: its elements (two of 4 bits in a byte), scales [..., blocks], wide type."""

    elements: Tensor
    scales: Tensor
    blocks: Blocks
    type: str
    shape: torch.Size

    def wide(self) -> Tensor:
        """The numbers that the elements stand for, in the type of the scales."""
        rows, columns = self.shape[-2:]
        values = decoded(self.elements, self.type, columns, self.scales.dtype)
        return values * _spread(self.scales, self.blocks, rows, columns)


def working_type(value: Tensor) -> torch.dtype:
    """The type in which products are made and added up: single precision at least."""
    return torch.promote_types(value.dtype, torch.float32)


def largest(value: Tensor) -> Tensor:
    """The largest magnitude of a tensor, [1], in single precision."""
    # An empty shard leaves the maximum over the ranks to the others.
    if not value.numel():
        return value.new_zeros(1, dtype=torch.float32)
    return value.detach().abs().amax().to(torch.float32).view(1)


def narrowed(
    value: Tensor, recipe: Recipe, kind: str, blocks: Blocks, whole: Tensor | None = None
) -> Narrow:
    """A tensor [..., rows, columns] in elements of `kind`.

    `whole`: the largest magnitude that the scale over the blocks' is made of, or that of the one
    scale, where blocks have none of their own.
    """
    wide = value.detach().to(working_type(value))
    most = largest_of_type(kind)
    if whole is not None and not recipe.block:
        scales = _without_zeros(whole.to(wide.dtype) / most)
    else:
        scales = scales_for(_maxima(wide, blocks) / most, recipe, most, whole)
    rows, columns = value.shape[-2:]
    elements = coded(wide / _spread(scales, blocks, rows, columns), kind)
    return Narrow(elements=elements, scales=scales, blocks=blocks, type=kind, shape=value.shape)


def largest_of_type(kind: str) -> float:
    """The largest number of a narrow type."""
    return _NUMBERS[-1] if kind == FLOAT4 else torch.finfo(getattr(torch, kind)).max


def coded(ratio: Tensor, kind: str) -> Tensor:
    """The elements of a narrow type that are nearest to these numbers."""
    # The largest one may be rounded beyond the type's largest number.
    most = largest_of_type(kind)
    ratio = ratio.clamp(-most, most)
    return _as_codes(ratio) if kind == FLOAT4 else ratio.float().to(getattr(torch, kind))


def decoded(elements: Tensor, kind: str, columns: int, dtype: torch.dtype) -> Tensor:
    """The numbers of elements, which may be given as bytes, in rows of so many columns."""
    if kind != FLOAT4:
        return elements.view(getattr(torch, kind)).to(dtype)
    # The element in front is in the low half of its byte.
    codes = torch.stack((elements & 15, elements >> 4), -1).flatten(-2)[..., :columns].long()
    numbers = torch.tensor(_NUMBERS, dtype=dtype, device=codes.device)
    return numbers[codes % _SIGN] * (1 - 2 * (codes // _SIGN))


def scales_for(wanted: Tensor, recipe: Recipe, most: float, whole: Tensor | None) -> Tensor:
    """The scales in the type in which a recipe stores them, as wide numbers."""
    if recipe.scale == "float8_e8m0fnu":
        # Rounded up to a power of two, so that no element is beyond the largest number.
        mantissa, exponent = torch.frexp(_without_zeros(wanted))
        power = (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(-127, 127)
        return torch.ldexp(torch.ones_like(wanted), power)
    if recipe.over:
        assert whole is not None
        limit = torch.finfo(torch.float8_e4m3fn).max
        over = _without_zeros(whole.to(wanted.dtype) / (most * limit))
        stored = (wanted / over).clamp(max=limit).float().to(torch.float8_e4m3fn)
        return _without_zeros(stored.to(wanted.dtype) * over)
    return _without_zeros(wanted.float().to(wanted.dtype))


def _without_zeros(scales: Tensor) -> Tensor:
    # A block of zeros stays one under any scale, but 0 / 0 is not a number.
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _sides(blocks: Blocks, rows: int, columns: int) -> Blocks:
    return blocks[0] or max(rows, 1), blocks[1] or max(columns, 1)


def _maxima(value: Tensor, blocks: Blocks) -> Tensor:
    """The largest magnitude of each block; blocks at the ends may be smaller."""
    rows, columns = value.shape[-2:]
    high, broad = _sides(blocks, rows, columns)
    filled = pad(value.abs(), (0, -columns % broad, 0, -rows % high))
    lead = filled.shape[:-2]
    in_blocks = filled.reshape(*lead, -(-rows // high), high, -(-columns // broad), broad)
    return in_blocks.amax((-3, -1))


def _spread(scales: Tensor, blocks: Blocks, rows: int, columns: int) -> Tensor:
    """The scale of each element."""
    if scales.dim() == 1:
        return scales
    high, broad = _sides(blocks, rows, columns)
    return scales.repeat_interleave(high, -2)[..., :rows, :].repeat_interleave(broad, -1)[
        ..., :columns
    ]


def _as_codes(ratio: Tensor) -> Tensor:
    """The nearest numbers of e2m1, ties to even codes, two codes in a byte."""
    between = torch.tensor(_BETWEEN, dtype=ratio.dtype, device=ratio.device)
    size = ratio.abs().contiguous()
    low = torch.bucketize(size, between)
    high = torch.bucketize(size, between, right=True)
    # Both differ where a number lies in the middle.
    codes = torch.where(low % 2 == 0, low, high) + _SIGN * (ratio < 0)
    codes = pad(codes.to(torch.uint8), (0, codes.shape[-1] % 2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
