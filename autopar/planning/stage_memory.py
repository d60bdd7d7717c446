"""The furthest end of a stage within the memory of its device and host, for every piece that it may begin with.

    memory_s[i, j] = stored + max( (in_flight_s - 1) saved + max over its operators k of (saved up to k + excess_k),
                                   max over k of (saved up to k + excess_k + flat behind k) )

It grows with every further piece, so the furthest end is found by doubling steps: of steps of 2^k pieces, the largest
first, each is taken if it fits.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from .operator_costs import OperatorCosts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class StageMemory:
    """The bytes of stages that hold pieces of operators; piece i begins with operator `pieces[i]`."""

    def __init__(self, figures: OperatorCosts, pieces: Ints) -> None:
        begins = pieces[:-1]
        saved, flat = np.cumsum(figures.saved), np.cumsum(figures.flat)
        alive = saved + figures.excess
        # Sums before each cut: saved, flat, stored, host. `highest`: the most bytes alive within each piece.
        # `highest_last`: the same less the sum of flat so far; plus the sum at the stage's end: "flat behind k".
        self.saved, self.flat = (np.concatenate(([0.0], total))[pieces] for total in (saved, flat))
        self.stored, self.host = (_before(getattr(figures, name), begins) for name in ("stored", "host"))
        self.highest = np.maximum.reduceat(alive, begins)
        self.highest_last = np.maximum.reduceat(alive - flat, begins)
        self._doubled: list[tuple[Floats, Floats]] = []

    def of(self, flying: float, i: int, j: int) -> float:
        """Bytes of a stage that holds the pieces i to j - 1, with so many micro-batches in flight."""
        kept = float(self.saved[j] - self.saved[i])
        during, last = float(self.highest[i:j].max()), float(self.highest_last[i:j].max() + self.flat[j])
        return float(self.stored[j] - self.stored[i]) + max((flying - 1) * kept + during, last) - float(self.saved[i])

    def host_of(self, i: int, j: int) -> float:
        """Bytes in host memory of the pieces i to j - 1."""
        return float(self.host[j] - self.host[i])

    def from_start(self, flying: float, limit: float, at: int) -> int:
        """The furthest end of one stage that begins at a piece, within so many bytes of its device."""
        saved, stored, flat, highest, highest_last = self._plain
        more, end, high, last = flying - 1, at, -math.inf, -math.inf
        while end < len(highest):
            high, last = max(high, highest[end]), max(last, highest_last[end])
            end += 1
            peak = max(more * (saved[end] - saved[at]) + high, last + flat[end]) - saved[at]
            if stored[end] - stored[at] + peak > limit:
                return end - 1
        return end

    @functools.cached_property
    def _plain(self) -> tuple[list[float], ...]:
        return tuple(values.tolist() for values in (self.saved, self.stored, self.flat, self.highest, self.highest_last))

    def furthest(self, flying: Floats, limits: Floats, hosts: Floats, longest: int | None = None) -> Ints:
        """The furthest end from every piece boundary: array [stages, pieces + 1].

        `flying`: micro-batches in flight; `limits`, `hosts`: bytes of the device and of its host; arrays [stages]. `longest`: stages of
        more pieces need not be looked at, one less than a power of two.
        """
        count = len(self.highest)
        starts = np.arange(count + 1)
        more, most, room = flying[:, None] - 1, limits[:, None], hosts[:, None]
        # `at`: the end so far of the stage from each start; `high`, `last`: the maxima of its pieces so far.
        at = np.tile(starts, (len(flying), 1))
        high, last = np.full(at.shape, -np.inf), np.full(at.shape, -np.inf)
        for power in reversed(range(min(count, longest or count).bit_length())):
            doubled, doubled_last = self._largest(power)
            end = np.minimum(at + (1 << power), count)
            step = np.minimum(at, len(doubled) - 1)
            higher, later = np.maximum(high, doubled[step]), np.maximum(last, doubled_last[step])
            kept = self.saved[end] - self.saved
            peak = np.maximum(more * kept + higher, later + self.flat[end]) - self.saved
            fits = (self.stored[end] - self.stored + peak <= most) & (self.host[end] - self.host <= room) & (at + (1 << power) <= count)
            at, high, last = np.where(fits, end, at), np.where(fits, higher, high), np.where(fits, later, last)
        return at

    def _largest(self, power: int) -> tuple[Floats, Floats]:
        """The maxima over 2^power pieces from each one on."""
        if not self._doubled:
            self._doubled.append((self.highest, self.highest_last))
        while len(self._doubled) <= power:
            half = 1 << (len(self._doubled) - 1)
            first, second = self._doubled[-1]
            self._doubled.append((np.maximum(first[:-half], first[half:]), np.maximum(second[:-half], second[half:])))
        return self._doubled[power]


def _before(values: Floats, begins: Ints) -> Floats:
    """The sums of the pieces before each cut."""
    return np.concatenate(([0.0], np.cumsum(np.add.reduceat(values, begins))))
