"""Attention in one kernel: blocks of 128 queries walk over their keys; constants are fitted.

B batches of H heads with d elements, S queries and K keys, in b = B H ceil(S / 128) blocks on the
units of a device. With a causal mask half of the keys is skipped, up to the block on the diagonal.
With a window all keys outside it are skipped, except in the blocks at its edges:

    pairs   = K', or (K' + 128) / 2 causal, at most window + 128 + edge; + start     of a block
    K'      = K rounded up to 128
    round   = 4 d 128 / (rate(d) peak / units)      seconds of a block for each key
    compute = max(round pairs (b / units + quantum (ceil(b / units) - b / units)),
                  round longest K')
    traffic = bytes^2 / (memory (bytes + held))
    busy    = (compute^blend + traffic^blend)^(1 / blend)
    seconds = launch + busy (1 + heat h / (1 + h)) + passes traffic,  h = (compute / warm)^2

`compute` is multiplied by `grouped` where heads share keys. Bytes in a cache of about `held` bytes
do not move. `passes` counts further work of a framework's kernel (rotary positions, a cache of
keys). Backward there are five products for the forward pass's two, at 0.863 of its rate:
FlashAttention-2 reaches 73 % of the peak forward and 63 % backward (Dao, arXiv:2307.08691, abstract
and section 4.1), FlashAttention-3 the same ratio within 2 % (Shah et al., arXiv:2407.08608, figures
5 and 6, heads of 128).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .products import Clock, Speed, heated, uncached

Floats = NDArray[np.float64]

BLOCK = 128
BACKWARD_WORK = 2.5
BACKWARD_RATE = 0.863
"""Products of the backward pass as a multiple of the forward ones, and their rate as a fraction of
the forward rate.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Local sizes of attention, arrays of one shape or numbers.

    `kv_heads`: heads with keys of their own, of all `heads`. `window`: keys before a query that it
    sees (0: all of them). `itemsize`: bytes of an element.
    """

    batch: Floats
    heads: Floats
    kv_heads: Floats
    queries: Floats
    keys: Floats
    width: Floats
    window: Floats | float = 0.0
    causal: NDArray[np.bool_] | bool = False
    itemsize: float = 2.0

    @property
    def traffic(self) -> Floats:
        """Bytes of queries, keys, values and results."""
        return np.asarray(
            2
            * self.itemsize
            * self.batch
            * self.width
            * (self.heads * self.queries + self.kv_heads * self.keys)
        )

    def pairs(self, start: float, edge: float) -> tuple[Floats, Floats]:
        """Keys that a block walks over, on average and at most."""
        keys = np.ceil(self.keys / BLOCK) * BLOCK
        # On average over blocks: the first one sees one block of keys, the last one all.
        seen = np.where(self.causal, (keys + BLOCK) / 2, keys)
        window = np.asarray(self.window)
        band = np.where(window > 0, window + BLOCK + edge, np.inf)
        return np.asarray(np.minimum(seen, band) + start), np.asarray(
            np.minimum(keys, band) + start
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """Constants of one device and kernel, as the formulas above name them.

    `widths`: rates of other head sizes, as fractions of that of 128. `backward_rate`: rate of the
    backward pass as a fraction of the forward one, where it was measured. `versions`: slowdown of
    other versions of the kernel, against the one most often measured.
    """

    burst: Clock
    sustained: Clock
    start: float
    edge: float
    quantum: float
    longest: float
    grouped: float
    launch: float
    passes: float
    blend: float
    held: float = 0.0
    backward_rate: float = BACKWARD_RATE
    widths: Mapping[str, float] = field(default_factory=dict, hash=False)
    versions: Mapping[str, float] = field(default_factory=dict, hash=False)

    def seconds(self, scores: Scores, speed: Speed, *, sustained: bool = True) -> Floats:
        """Seconds of the forward pass with its launch."""
        clock = self.sustained if sustained else self.burst
        compute = self._compute(scores, speed, clock)
        traffic = self._traffic(scores, speed)
        busy = (compute**self.blend + traffic**self.blend) ** (1 / self.blend)
        return np.asarray(self.launch + heated(busy, compute, clock) + self.passes * traffic)

    def backward(self, scores: Scores, speed: Speed, *, sustained: bool = True) -> Floats:
        """Return the seconds of the backward pass by the rule above.

        A kernel before it sums rows, one behind it casts the gradient.
        """
        forward = (
            self.seconds(scores, speed, sustained=sustained)
            - self.launch
            - self.passes * self._traffic(scores, speed)
        )
        return np.asarray(3 * self.launch + forward * BACKWARD_WORK / self.backward_rate)

    def _traffic(self, scores: Scores, speed: Speed) -> Floats:
        """Seconds that memory takes."""
        return np.asarray(uncached(scores.traffic, self.held) / speed.memory)

    def rate(self, width: Floats) -> Floats:
        """Return the rate of heads of this size as a fraction of that of 128.

        It is linear between the measured sizes.
        """
        known = sorted(
            {128.0: 1.0, **{float(size): share for size, share in self.widths.items()}}.items()
        )
        # Beyond the measured sizes the nearest one holds.
        return np.asarray(
            np.interp(width, [size for size, _ in known], [share for _, share in known])
        )

    def _compute(self, scores: Scores, speed: Speed, clock: Clock) -> Floats:
        pairs, most = scores.pairs(self.start, self.edge)
        each = scores.batch * scores.heads * np.ceil(scores.queries / BLOCK) / speed.units
        rounds = each + self.quantum * (np.ceil(each) - each)
        # A key takes 4 d operations a query: a multiplication and an addition in two products.
        block = (
            4
            * scores.width
            * BLOCK
            * speed.units
            / (speed.flops * clock.rate * self.rate(scores.width))
        )
        shared = np.where(scores.kv_heads < scores.heads, self.grouped, 1.0)
        return np.asarray(shared * block * np.maximum(pairs * rounds, self.longest * most))
