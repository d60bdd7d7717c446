"""Matrix products on a device: tiles, waves, a split inner side, cache, memory and power.

A product [m, k] x [k, n] (a `batch` of them) is computed in tiles by the units of a device, wave
after wave (NVIDIA, Matrix Multiplication Background User's Guide: tile and wave quantisation). With
t tiles in all, w = t / units tiles for each unit, and s parts of k:

    waves   = max(w, 1) + quantum (ceil(w) - w)
    tile    = 2 area (k / (s rate(area)) + epilogue) + 2 128^2 prologue            operations
    compute = max(waves tile, t (rows + columns) k / s / cache) + the sum of s parts
              at the best tile and the best s
    traffic = bytes^2 / (stream (bytes + held))
    busy    = (compute^blend + traffic^blend)^(1 / blend)
    seconds = launch + busy (1 + heat h / (1 + h)),  h = (compute / warm)^2

Constants are fitted. `quantum` is 1 for whole waves, 0 where units take up each other's work.
`rate` is a fraction of the peak for the largest tiles. Bytes in a cache of about `held` bytes do
not move. The last line is the clock: a device that computes for longer than `warm` meets its power
limit. `burst` constants are those of a few products after a rest. `sustained` constants, which hold
in a training step, are those of the same products repeated for a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Rows and columns of the tiles that libraries have, largest first, with every split of the inner
# side.
_TILES = (
    (256, 256),
    (256, 128),
    (128, 256),
    (192, 128),
    (128, 192),
    (128, 128),
    (256, 64),
    (64, 256),
    (128, 64),
    (64, 128),
    (64, 64),
)
_SPLITS = (1, 2, 3, 4, 6, 8, 16)
_ROWS, _COLUMNS, _SPLIT = np.array(
    [(*tile, split) for tile in _TILES for split in _SPLITS], dtype=np.float64
).T[:, :, None]
_AREA = _ROWS * _COLUMNS
_STEP = 64
"""Inner elements that a kernel loads at a time."""
_SUMS = 4
"""Bytes of an element of a partial sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Local sizes of a matrix product, arrays of one shape: `batch` times [m, k] and [k, n]."""

    batch: Floats
    m: Floats
    n: Floats
    k: Floats

    def turned(self) -> tuple[Product, Product]:
        """Return the products of the backward pass.

        They make the gradient of the left operand [m, k], and of the right one [k, n].
        """
        return Product(batch=self.batch, m=self.m, n=self.k, k=self.n), Product(
            batch=self.batch, m=self.k, n=self.n, k=self.m
        )

    def traffic(self, itemsize: float, out: float) -> Floats:
        """Bytes of both operands and the result, each moved once."""
        return np.asarray(
            self.batch * ((self.m * self.k + self.k * self.n) * itemsize + self.m * self.n * out)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The rates of a device for a dtype.

    `flops`: FLOP/s of its arithmetic. `memory`: B/s of its memory. `reference`: B/s of the memory
    that constants are shares of.
    """

    flops: float
    memory: float
    reference: float
    units: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The effect of power on arithmetic.

    `rate`: of a tile of 256 x 128 at rest, as a fraction of the peak. `heat`: slowdown of products
    that last longer than `warm` seconds.
    """

    rate: float
    heat: float
    warm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Differences of a library's product of this dtype.

    `factor`: slowdown of the whole. Before the product the left operand is quantised, which moves
    it `passes` times in 16 bits, except for the bytes in a cache (`held`), and takes `start`
    seconds more.
    """

    factor: float = 1.0
    passes: float = 0.0
    start: float = 0.0
    held: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductForm:
    """Constants of one device and dtype, as the formulas above name them.

    `square`, `whole`, `half`, `quarter`: rates of tiles of 256 x 256, 128 x 128, 128 x 64 and 64 x
    64, as fractions of that of 256 x 128. `prologue`: inner steps of a tile of 128 x 128;
    `epilogue`: inner steps of each tile. `stream`, `cache`: multiples of the memory's B/s; `held`:
    bytes of the cache. `split`: seconds to sum the parts of an inner side.
    """

    burst: Clock
    sustained: Clock
    square: float
    whole: float
    half: float
    quarter: float
    prologue: float
    epilogue: float
    launch: float
    stream: float
    cache: float
    quantum: float
    split: float
    blend: float
    held: float = 0.0
    libraries: Mapping[str, Library] = field(default_factory=dict, hash=False)

    def seconds(
        self,
        product: Product,
        speed: Speed,
        *,
        itemsize: float,
        nbytes: Floats | None = None,
        slower: Floats | float = 1.0,
        sustained: bool = True,
    ) -> Floats:
        """Seconds, with launch, of products of operands with elements of `itemsize` bytes.

        `nbytes`: the bytes that they move (None: the operands, and results of 16 bits). `slower`:
        factor on the arithmetic.
        """
        clock = self.sustained if sustained else self.burst
        compute = self._compute(product, speed, clock, itemsize) * slower
        moved = product.traffic(itemsize, 2.0) if nbytes is None else nbytes
        traffic = uncached(moved, self.held) / (speed.memory * self.stream)
        busy = (compute**self.blend + traffic**self.blend) ** (1 / self.blend)
        return self.launch + heated(busy, compute, clock)

    def _compute(self, product: Product, speed: Speed, clock: Clock, itemsize: float) -> Floats:
        """Seconds of the arithmetic at the best tile and split."""
        batch = product.batch
        m = product.m
        n = product.n
        k = product.k
        cache = speed.reference * self.cache
        # A kernel loads whole steps of the inner side, and pads the last one.
        inner = np.ceil(k / _SPLIT / _STEP) * _STEP
        # Rates between tiles of 64 x 64 (2^12 elements) and 256 x 256, linear in their logarithms.
        reached = np.exp(
            np.interp(
                np.log2(_AREA),
                (12, 13, 14, 15, 16),
                np.log((self.quarter, self.half, self.whole, 1.0, self.square)),
            )
        )
        work = 2 * _AREA * (inner / reached + self.epilogue) + 2 * 128 * 128 * self.prologue
        tiles = batch * np.ceil(m / _ROWS) * np.ceil(n / _COLUMNS) * _SPLIT
        spent = (
            waves(tiles / speed.units, self.quantum)
            * work
            * (speed.units / (speed.flops * clock.rate))
        )
        # Each tile loads its rows and columns through the cache; partial sums are written and read.
        loaded = tiles * (_ROWS + _COLUMNS) * (k / _SPLIT) * itemsize / cache
        summed = np.where(
            _SPLIT > 1, batch * m * n * (2 * _SUMS * _SPLIT) / cache + self.split, 0.0
        )
        return np.asarray((np.maximum(spent, loaded) + summed).min(axis=0))


def uncached(moved: Floats, held: float) -> Floats:
    """The moved bytes that a cache of about `held` bytes misses: few of few, nearly all of many."""
    return np.asarray(moved * moved / np.maximum(moved + held, 1.0))


def waves(each: Floats, quantum: float) -> Floats:
    """Rounds of work that take `each` tiles a unit."""
    # Fewer tiles than units still take as long as one.
    return np.asarray(np.where(each <= 1, 1.0, each + quantum * (np.ceil(each) - each)))


def heated(busy: Floats, compute: Floats, clock: Clock) -> Floats:
    """Return busy seconds at the clock that the power limit leaves after `compute` seconds."""
    share = 1 / (1 + (clock.warm / np.maximum(compute, 1e-12)) ** 2)
    return np.asarray(busy * (1 + clock.heat * share))
