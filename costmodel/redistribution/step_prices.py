"""Prices of a step's collectives, for every number of shards at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.sharding.mesh import Axes
from autopar.sharding.redistribution import STEP_PENALTY, Transfer

Floats = NDArray[np.float64]
LinePrices = Callable[[str, Axes], tuple[tuple[float, float], ...]]
"""The lines (seconds, seconds per byte) whose minimum is a collective's time, given its name and
its mesh axes.
"""
Often = tuple[float, float]
"""The number of times that collectives to the value, and to its gradient, are issued."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Charges:
    """The prices of a tensor's redistributions.

    `lines`: of the collectives. `often`: how many times they are issued. `wider`: bytes of the
    gradient for each byte of the value.
    """

    lines: LinePrices
    often: Often = (1.0, 1.0)
    wider: float = 1.0


class Moves:
    """The collectives of kinds of steps over the same axes, each numbered once (-1: none)."""

    def __init__(self) -> None:
        self._numbers: dict[Transfer, int] = {}
        self._pairs: dict[tuple[int, int], int] = {}

    def number(self, ahead: Transfer | None, back: Transfer | None) -> int:
        """The number of a kind of step, by its collectives to the value and to its gradient."""
        pair = self._of(ahead), self._of(back)
        return self._pairs.setdefault(pair, len(self._pairs))

    def _of(self, transfer: Transfer | None) -> int:
        return -1 if transfer is None else self._numbers.setdefault(transfer, len(self._numbers))

    def seconds(self, axes: Axes, sizes: Floats, charges: Charges) -> Floats:
        """Return the seconds of every kind of step for every shard size: array [kinds, sizes]."""
        often = charges.often
        ahead = self._sent(axes, sizes, charges.lines)
        back = ahead
        # Gradients may travel in wider elements than values; else both take the same seconds.
        if charges.wider != 1.0:
            back = self._sent(axes, charges.wider * sizes, charges.lines)
        # Without any kind of step the array still needs its two columns.
        numbers = np.array(list(self._pairs) or [(-1, -1)], dtype=np.int64)
        return np.asarray(
            STEP_PENALTY + often[0] * ahead[numbers[:, 0]] + often[1] * back[numbers[:, 1]]
        )

    def _sent(self, axes: Axes, sizes: Floats, price: LinePrices) -> Floats:
        """Seconds of every transfer for every size; the last row: nothing is sent."""
        seconds = np.zeros((len(self._numbers) + 1, len(sizes)))
        for row, transfer in enumerate(self._numbers):
            alphas, betas = _columns(price(transfer.collective, axes))
            # The backend takes the algorithm that is fastest for these bytes.
            seconds[row] = (alphas + betas * (transfer.scale * sizes)).min(axis=0)
        return seconds


# The same few collectives are priced for every tensor.
@functools.lru_cache(maxsize=4096)
def _columns(lines: tuple[tuple[float, float], ...]) -> tuple[Floats, Floats]:
    """The seconds, and the seconds per byte, of lines: two arrays [lines, 1]."""
    alphas, betas = np.array(lines).T[:, :, None]
    return alphas, betas
