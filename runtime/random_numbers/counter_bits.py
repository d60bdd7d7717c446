"""Random bits by counter, a pure function of seed, step, operator and an element's place.

    bits(i, j) = mix(a_i + b_i c_j, d_j)

    i: row, the leading dims of the whole tensor
    j: column, its other dims

`a_i` and `b_i` (odd) are the halves of a 64-bit hash of the row's number under the key; `c_j` and
`d_j` are keyed permutations of the 32-bit numbers of columns, so that no two columns are equal; the
key is a BLAKE2b digest. Rows and columns are hashed once, and only the product and `mix` run on
every element: 32-bit integer operations that wrap, the same on every device. More than 2^32
elements are no special case.

The row's hash is the finalizer of SplitMix64 (Stafford's variant 13, in
http://prng.di.unimi.it/splitmix64.c); `mix` is `triple32` of Wellons' search for hashes of low bias
(https://github.com/skeeto/hash-prospector), with `d_j` added after its first round so that a row is
no permutation; without, it permutes the numbers of columns. Tested on 2^21 numbers at a time: mean,
variance, chi-square of every byte, the correlation of every pair of bits between neighbours along
rows and columns, between distant ones, over rectangles, and between draws whose seed, step,
operator or stream differ by one; collisions, and ranks of bit matrices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .draw_state import Draws

AT_ONCE = 2**16
"""Elements that are mixed at once on a CPU, so that they stay in its cache."""
_AT_ONCE_ELSEWHERE = 2**26
_ROWS_AT_ONCE = 2**13
_ROW = 5  # cost of a row, in hashes of a column
_MASK64 = 2**64 - 1


class Key(NamedTuple):
    """The key of a draw: 64 bits for the rows, twice 32 for the columns, as signed numbers."""

    rows: int
    first: int
    second: int

    @classmethod
    def of(cls, draws: Draws, operator: int, stream: int = 0) -> Key:
        """The key of an operator's draw in a step; `stream` numbers several draws."""
        text = f"{draws.seed} {draws.step} {operator} {stream}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        parts = digest[:8], digest[8:12], digest[12:]
        return cls(*(int.from_bytes(part, "big", signed=True) for part in parts))


Cuts = Sequence[Sequence[int]]


def places(size: int, cuts: Cuts, local: Tensor) -> Tensor:
    """Places of a shard's elements `local` along a whole dim of `size`.

    `cuts` (see `Cut`) are those of the dim.
    """
    # The length of the dim before each cut.
    lengths = []
    for _, _, degree, _ in cuts:
        lengths.append(size)
        size //= degree
    # From the shard outwards: the last cut is undone first.
    for (_, parts, degree, coordinate), length in reversed(list(zip(cuts, lengths, strict=True))):
        chunk = length // (parts * degree)
        if parts > 1:
            # The other shards' chunks lie between the chunks of two parts.
            part = torch.div(local, chunk, rounding_mode="floor")
            local = local + part * ((degree - 1) * chunk)
        local = local + coordinate * chunk
    return local


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a whole tensor: the cuts of each dim that lead to a shard, and a range of each."""

    whole: tuple[int, ...]
    cuts: tuple[Cuts, ...]
    ranges: tuple[range, ...]
    device: torch.device

    @classmethod
    def of(cls, whole: Sequence[int], cuts: Cuts, device: torch.device | str = "cpu") -> Region:
        """The part to which cuts lead."""
        of_dims = tuple(tuple(cut for cut in cuts if cut[0] == dim) for dim in range(len(whole)))
        sizes = (
            size // math.prod(degree for _, _, degree, _ in own)
            for size, own in zip(whole, of_dims, strict=True)
        )
        return cls(
            tuple(whole), of_dims, tuple(range(size) for size in sizes), torch.device(device)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the part."""
        return tuple(map(len, self.ranges))

    def narrow(self, dim: int, start: int, stop: int) -> Region:
        """A part of the part along one dim."""
        dim %= len(self.ranges)
        return replace(
            self, ranges=(*self.ranges[:dim], self.ranges[dim][start:stop], *self.ranges[dim + 1 :])
        )

    @property
    def border(self) -> int:
        """The dim at which the columns begin, so that hashing rows and columns costs the least."""

        def cost(dim: int) -> int:
            # By the whole tensor's sizes, not the part's: all ranks must draw the same border.
            return _ROW * math.prod(self.whole[:dim]) + math.prod(self.whole[dim:])

        return min(range(len(self.whole) + 1), key=cost)

    def numbers(self, dims: range, start: int, stop: int) -> Tensor:
        """The numbers in the whole of the elements from `start` to `stop`, these dims as one."""
        local = torch.arange(start, stop, device=self.device)
        joined = self._joined(dims)
        if len(joined) == 1:
            ((size, cuts, held),) = joined
            return places(size, cuts, local + held.start if held.start else local)
        out = torch.zeros_like(local)
        beyond = 1
        for size, cuts, held in reversed(joined):
            out.add_(places(size, cuts, local % len(held) + held.start), alpha=beyond)
            local = torch.div(local, len(held), rounding_mode="floor")
            beyond = beyond * size
        return out

    def _joined(self, dims: range) -> list[tuple[int, Cuts, range]]:
        """Size, cuts and range of each dim; a whole dim is joined to the one before."""
        joined: list[tuple[int, Cuts, range]] = []
        for dim in dims:
            size = self.whole[dim]
            held = self.ranges[dim]
            if joined and len(held) == size:
                before, cuts, outer = joined[-1]
                joined[-1] = before * size, cuts, range(outer.start * size, outer.stop * size)
            else:
                joined.append((size, self.cuts[dim], held))
        return joined


def _signed(number: int, bits: int) -> int:
    """The number with these bits, with a sign."""
    number &= 2**bits - 1
    return number - 2**bits if number >> (bits - 1) else number


_MIX = tuple(
    (shift, _signed(factor, 32))
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
)
_LAST = 14
_FINALIZER = tuple(
    (shift, _signed(factor, 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
)


def _fold(x: Tensor, shift: int, spare: Tensor) -> None:
    """x ^= x >> shift, where the sign is a bit like any other."""
    torch.bitwise_right_shift(x, shift, out=spare)
    spare.bitwise_and_(2 ** (x.element_size() * 8 - shift) - 1)
    x.bitwise_xor_(spare)


def _mix(x: Tensor, spare: Tensor, more: Tensor | None = None) -> None:
    """A permutation of the 32-bit numbers, in place; `more` is added on the way."""
    for number, (shift, factor) in enumerate(_MIX):
        _fold(x, shift, spare)
        x.mul_(factor)
        # Behind the first round, so that a row is no permutation of the columns' numbers.
        if more is not None and not number:
            x.add_(more)
    _fold(x, _LAST, spare)


def _hashed_rows(numbers: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Two 32-bit columns of a hash of the numbers, the second odd."""
    x = numbers.mul(_signed(0x9E3779B97F4A7C15, 64)).add_(key)
    spare = torch.empty_like(x)
    for shift, factor in _FINALIZER:
        _fold(x, shift, spare)
        x.mul_(factor)
    _fold(x, 31, spare)
    return _low(x).unsqueeze(1), _low(x.bitwise_right_shift_(32)).bitwise_or_(1).unsqueeze(1)


def _low(x: Tensor) -> Tensor:
    """The lower 32 bits, with a sign."""
    return x.bitwise_and(0xFFFFFFFF).sub_(2**31).to(torch.int32).bitwise_xor_(-(2**31))


def _hashed_columns(numbers: Tensor, count: int, key: Key) -> tuple[Tensor, Tensor]:
    """Two permutations of the columns' numbers; above 2^32 columns, two for each run of so many."""
    x = _low(numbers)
    spare = torch.empty_like(x)

    def permute(word: int) -> Tensor:
        x.add_(word)
        # The upper halves shift the runs of 2^32 columns against one another.
        if count > 2**32:
            x.add_(_low(numbers >> 32).mul_(_MIX[0][1]))
        _mix(x, spare)
        return x.clone()

    first = permute(key.first)
    return first, permute(key.second)


def _hashes(
    key: Key, region: Region, wide: int, high: int
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor, Tensor]]:
    """Blocks of `wide` columns and `high` rows: first row and column, `a`, `b`, `c`, `d`.

    The rows of many blocks are hashed at once, since a block may have few.
    """
    rows = range(region.border)
    columns = range(region.border, len(region.whole))
    height = math.prod(region.shape[: len(rows)])
    width = math.prod(region.shape[len(rows) :])
    count = math.prod(region.whole[len(rows) :])
    span = high * max(1, _ROWS_AT_ONCE // high)
    for left in range(0, width, wide):
        c, d = _hashed_columns(region.numbers(columns, left, min(left + wide, width)), count, key)
        for first in range(0, height, span):
            added, factor = _hashed_rows(
                region.numbers(rows, first, min(first + span, height)), key.rows
            )
            for top in range(0, len(added), high):
                yield first + top, left, added[top : top + high], factor[top : top + high], c, d


def blocks(key: Key, region: Region) -> Iterator[tuple[slice, slice, Tensor]]:
    """Bits (int32) of some rows and columns of the region's matrix at a time.

    Each block lies in memory that the next one takes.
    """
    border = region.border
    height = math.prod(region.shape[:border])
    width = math.prod(region.shape[border:])
    if not height or not width:
        return
    most = AT_ONCE if region.device.type == "cpu" else _AT_ONCE_ELSEWHERE
    wide = min(width, most)
    high = min(height, max(1, most // wide))
    memory = torch.empty(high * wide, dtype=torch.int32, device=region.device)
    spare = torch.empty_like(memory)
    for top, left, a, b, c, d in _hashes(key, region, wide, high):
        # Blocks at the edges are smaller.
        block = memory[: len(a) * len(c)].view(len(a), len(c))
        torch.mul(b, c, out=block)
        block.add_(a)
        _mix(block, spare[: len(a) * len(c)].view(len(a), len(c)), d)
        yield slice(top, top + len(a)), slice(left, left + len(c)), block


def matrix_of(out: Tensor, region: Region) -> Tensor:
    """A tensor of the region's shape as the matrix that `blocks` walks."""
    border = region.border
    return out.view(math.prod(region.shape[:border]), math.prod(region.shape[border:]))


def bits(key: Key, region: Region) -> Tensor:
    """32 random bits for each element, as int32."""
    out = torch.empty(region.shape, dtype=torch.int32, device=region.device)
    matrix = matrix_of(out, region)
    for rows, columns, block in blocks(key, region):
        matrix[rows, columns] = block
    return out
