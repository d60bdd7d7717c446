"""Grouped products, one for each expert of a rank, with constants fitted to measured layers.

Experts have different numbers of rows. Each fills tiles of its own, so there are at least as many
tiles as experts with rows:

    tiles   = sum over the experts of ceil(rows / r) ceil(n / 128)      at the best r of 16 to 256
    compute = waves(tiles / units) (2 r 128 (k / rate(r) + prologue)) units / (peak rate)
    rate(r) = (r / 128)^small below 128 rows
    busy    = (compute^blend + (bytes / stream)^blend)^(1 / blend)

A whole layer, as frameworks measure it, is its two products (the first of two widths if it is
gated), made longer by the clock as in `products`, plus the rows' way there and back: `passes` over
the bytes of the layer's rows, `tokens` over the tokens that come and go, `expert` seconds for each
expert, and a launch. `others` is the share of other ranks' rows that a kernel walks over to skip
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .products import Clock, Speed, heated, waves

Floats = NDArray[np.float64]

ROWS = np.array([16.0, 32.0, 64.0, 128.0, 256.0])[:, None]
"""Rows of a tile."""
_COLUMNS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """Distribution of rows over the experts of a rank.

    `rows`: all rows. `active`: experts with rows. `tiles` [5, n]: tiles of `ROWS` rows that hold
    them.
    """

    rows: Floats
    active: Floats
    tiles: Floats

    @classmethod
    def evenly(cls, rows: Floats, experts: Floats) -> Dealt:
        """Equally many rows for every expert."""
        # With fewer rows than experts some experts have none, and their weights are not read.
        active = np.minimum(experts, np.maximum(rows, 1.0))
        return cls(
            rows=rows, active=active, tiles=np.asarray(active * np.ceil(rows / active / ROWS))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedProduct:
    """The products [rows, k] x [k, n] of the experts of a rank, with its rows as they are dealt."""

    dealt: Dealt
    n: Floats
    k: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of experts on one rank.

    `tokens` of `width` come in; experts have `inner` columns and, if `gated`, a second product of
    that width. `others`: rows of other ranks. `even`: whether every expert has equally many rows.
    """

    dealt: Dealt
    tokens: Floats
    experts: Floats
    width: Floats
    inner: Floats
    gated: NDArray[np.bool_]
    others: Floats
    even: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedForm:
    """Constants of one device, kernel and dtype, as the formulas above name them.

    `uneven`: slowdown of compute where experts have unequal numbers of rows.
    """

    burst: Clock
    sustained: Clock
    small: float
    prologue: float
    quantum: float
    stream: float
    blend: float
    passes: float
    tokens: float
    expert: float
    others: float
    uneven: float
    launch: float

    def product(
        self,
        product: GroupedProduct,
        speed: Speed,
        *,
        itemsize: float,
        nbytes: Floats | None = None,
        sustained: bool = True,
        slower: Floats | float = 1.0,
    ) -> Floats:
        """Return the seconds of the products of all experts, without launch.

        `nbytes`: the bytes that they move (None: weights, rows and results, as below).
        """
        dealt = product.dealt
        n = product.n
        k = product.k
        clock = self.sustained if sustained else self.burst
        # Larger tiles gain little: a tenth of the exponent.
        reached = (ROWS / 128) ** np.where(ROWS < 128, self.small, 0.1 * self.small)
        work = (
            2
            * ROWS
            * _COLUMNS
            * (k / reached + self.prologue)
            * speed.units
            / (speed.flops * clock.rate)
        )
        tiles = dealt.tiles * np.ceil(n / _COLUMNS) / speed.units
        compute = (waves(tiles, self.quantum) * work).min(axis=0) * slower
        # Weights of the experts with rows, the rows themselves, and results of 16 bits.
        if nbytes is None:
            nbytes = (dealt.active * n + dealt.rows) * k * itemsize + 2 * dealt.rows * n
        traffic = nbytes / (speed.memory * self.stream)
        return heated(
            (compute**self.blend + traffic**self.blend) ** (1 / self.blend), compute, clock
        )

    def seconds(
        self, layer: Layer, speed: Speed, *, itemsize: float, sustained: bool = True
    ) -> Floats:
        """Seconds of a whole layer."""
        given = layer.dealt
        dealt = Dealt(
            rows=given.rows,
            active=given.active,
            tiles=given.tiles + self.others * layer.others / ROWS,
        )
        slower = np.where(layer.even, 1.0, 1.0 + self.uneven)
        # The gate and the first product run as one of twice the width.
        first = np.where(layer.gated, 2, 1) * layer.inner
        busy = sum(
            self.product(
                GroupedProduct(dealt=dealt, n=n, k=k),
                speed,
                itemsize=itemsize,
                sustained=sustained,
                slower=slower,
            )
            for n, k in ((first, layer.width), (layer.width, layer.inner))
        )
        moved = (
            self.passes * given.rows * (2 * layer.width + 3 * layer.inner)
            + self.tokens * 2 * layer.tokens * layer.width
        )
        return np.asarray(self.launch + busy + moved / speed.memory + self.expert * layer.experts)
