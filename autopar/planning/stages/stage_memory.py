"""The memory of stages, and the furthest end of a stage within the memory of its device and host.

A stage holds the pieces i to j - 1. Its peak is in some forward or backward pass with the other
micro-batches in flight, or in its last backward pass, when flat copies of gradients are made:

    memory_s[i, j] = stored + max( (in_flight_s - 1) saved + max over k of alive_k,
                                   max over k of (alive_k + flat behind k) )

    alive_k = saved up to operator k + excess_k

The memory grows with every further piece. So the furthest end is found by doubling steps: of steps
of 2^n pieces, the largest first, each is taken if it fits.
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
    """The bytes of stages that hold pieces; piece i begins with operator `pieces[i]`."""

    def __init__(self, figures: OperatorCosts, pieces: Ints) -> None:
        begins = pieces[:-1]
        saved = np.cumsum(figures.saved)
        flat = np.cumsum(figures.flat)
        alive = saved + figures.excess
        # The sums before each cut.
        self.saved = np.concatenate(([0.0], saved))[pieces]
        self.flat = np.concatenate(([0.0], flat))[pieces]
        self.stored = _before(figures.stored, begins)
        self.host = _before(figures.host, begins)
        # The most bytes alive within each piece, and the same less the flat copies up to there. To
        # the latter the flat copies up to the end of a stage are added, which are those behind k.
        self.highest = np.maximum.reduceat(alive, begins)
        self.highest_last = np.maximum.reduceat(alive - flat, begins)
        self._doubled: list[tuple[Floats, Floats]] = []

    def of(self, flying: float, i: int, j: int) -> tuple[float, float]:
        """Return the bytes of a stage that holds the pieces i to j - 1, at work and beyond rest.

        `flying`: micro-batches in flight. At rest a stage holds what all of them have saved.
        """
        saved = float(self.saved[j] - self.saved[i])
        during = float(self.highest[i:j].max())
        # In the last backward pass no other micro-batch is in flight.
        last = float(self.highest_last[i:j].max() + self.flat[j])
        peak = max((flying - 1) * saved + during, last) - float(self.saved[i])
        return float(self.stored[j] - self.stored[i]) + peak, max(peak - flying * saved, 0.0)

    def host_of(self, i: int, j: int) -> float:
        """Return the bytes in host memory of the pieces i to j - 1."""
        return float(self.host[j] - self.host[i])

    def from_start(self, flying: float, limit: float, at: int) -> int:
        """Return the furthest end of one stage that begins at piece `at`, within so many bytes."""
        saved, stored, flat, highest, highest_last = self._plain
        more = flying - 1
        end = at
        high = -math.inf
        last = -math.inf
        while end < len(highest):
            high = max(high, highest[end])
            last = max(last, highest_last[end])
            end += 1
            peak = max(more * (saved[end] - saved[at]) + high, last + flat[end]) - saved[at]
            if stored[end] - stored[at] + peak > limit:
                return end - 1
        return end

    @functools.cached_property
    def _plain(self) -> tuple[list[float], ...]:
        return tuple(
            values.tolist()
            for values in (self.saved, self.stored, self.flat, self.highest, self.highest_last)
        )

    def furthest(
        self, flying: Floats, limits: Floats, hosts: Floats, longest: int | None = None
    ) -> Ints:
        """Return the furthest end from every piece boundary: array [stages, pieces + 1].

        `flying`, `limits`, `hosts`: arrays [stages] of micro-batches in flight, and bytes of the
        device and of its host. `longest`: no stage of more pieces is looked at (one less than a
        power of two).
        """
        count = len(self.highest)
        starts = np.arange(count + 1)
        more = flying[:, None] - 1
        most = limits[:, None]
        room = hosts[:, None]
        # The end so far of the stage from each start, and the maxima of its pieces so far.
        at = np.tile(starts, (len(flying), 1))
        high = np.full(at.shape, -np.inf)
        last = np.full(at.shape, -np.inf)
        for power in reversed(range(min(count, longest or count).bit_length())):
            doubled, doubled_last = self._largest(power)
            end = np.minimum(at + (1 << power), count)
            step = np.minimum(at, len(doubled) - 1)
            higher = np.maximum(high, doubled[step])
            later = np.maximum(last, doubled_last[step])
            saved = self.saved[end] - self.saved
            peak = np.maximum(more * saved + higher, later + self.flat[end]) - self.saved
            fits = (
                (self.stored[end] - self.stored + peak <= most)
                & (self.host[end] - self.host <= room)
                & (at + (1 << power) <= count)
            )
            at = np.where(fits, end, at)
            high = np.where(fits, higher, high)
            last = np.where(fits, later, last)
        return at

    def _largest(self, power: int) -> tuple[Floats, Floats]:
        """Return the maxima over 2^power pieces from each one on."""
        if not self._doubled:
            self._doubled.append((self.highest, self.highest_last))
        while len(self._doubled) <= power:
            half = 1 << (len(self._doubled) - 1)
            first, second = self._doubled[-1]
            self._doubled.append(
                (np.maximum(first[:-half], first[half:]), np.maximum(second[:-half], second[half:]))
            )
        return self._doubled[power]


def _before(values: Floats, begins: Ints) -> Floats:
    """Return the sum over all pieces before each cut."""
    return np.concatenate(([0.0], np.cumsum(np.add.reduceat(values, begins))))
