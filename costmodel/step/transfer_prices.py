"""Prices of a step's collectives, for every number of shards at once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autopar.sharding.mesh import Axes
from autopar.sharding.redistribution import STEP_PENALTY, Transfer

Floats = NDArray[np.float64]
LinePrices = Callable[[str, Axes], tuple[tuple[float, float], ...]]
"""The lines (seconds, seconds per byte) whose minimum is a collective's time, given its name and its mesh axes."""
Often = tuple[float, float]
"""The number of times that collectives to the value, and to its gradient, are issued."""


class Moves:
    """The collectives of several kinds of steps over the same axes, each numbered once; -1 is none."""

    def __init__(self) -> None:
        self._numbers: dict[Transfer, int] = {}
        self._pairs: dict[tuple[int, int], int] = {}

    def number(self, ahead: Transfer | None, back: Transfer | None) -> int:
        """The number of a kind of step, by its collectives to the value and to its gradient."""
        pair = self._of(ahead), self._of(back)
        return self._pairs.setdefault(pair, len(self._pairs))

    def _of(self, transfer: Transfer | None) -> int:
        return -1 if transfer is None else self._numbers.setdefault(transfer, len(self._numbers))

    def seconds(self, axes: Axes, sizes: Floats, price: LinePrices, often: Often, wider: float) -> Floats:
        """Seconds of every kind of step for every size of a shard: array [kinds of steps, sizes].

        `wider`: bytes of the gradient for each byte of the value.
        """
        ahead = self._sent(axes, sizes, price)
        back = ahead if wider == 1.0 else self._sent(axes, wider * sizes, price)
        numbers = np.array(list(self._pairs) or [(-1, -1)], dtype=np.int64)
        return np.asarray(STEP_PENALTY + often[0] * ahead[numbers[:, 0]] + often[1] * back[numbers[:, 1]])

    def _sent(self, axes: Axes, sizes: Floats, price: LinePrices) -> Floats:
        """Seconds of every transfer for every size; the last row: nothing is sent."""
        seconds = np.zeros((len(self._numbers) + 1, len(sizes)))
        for row, transfer in enumerate(self._numbers):
            moved = transfer.scale * sizes
            seconds[row] = functools.reduce(np.minimum, [alpha + beta * moved for alpha, beta in price(transfer.collective, axes)])
        return seconds
