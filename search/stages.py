"""Pipeline stages as contiguous cuts of a chain: the slowest stage as fast as it can be.

    best[s][j] = min over i < j of  max(best[s - 1][i], cost_s[i, j])          best[0][0] = 0

cost_s[i, j] is what stage s takes for the pieces i to j - 1 (infinite where they do not fit its memory). Of equally good cuts the sum of
squares decides, so that the other stages are balanced too. Source: PipeDream's partitioner (D. Narayanan et al., SOSP 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .costgraph import Table


def partition(costs: Sequence[Table]) -> tuple[int, ...] | None:
    """The cuts 0 = c_0 < c_1 < ... < c_p = n between stages, given a table [n + 1, n + 1] for each stage; None where nothing fits.

    >>> times = np.array([1.0, 1.0, 1.0, 3.0])
    >>> table = interval_sums(times)
    >>> partition([table, table])
    (0, 3, 4)
    """
    count = len(costs[0]) - 1
    worst = _bottleneck(costs)
    if worst == math.inf:
        return None
    best = np.full(count + 1, math.inf)
    best[0] = 0.0
    came: list[np.ndarray] = []
    for cost in costs:
        allowed = np.where(cost <= worst, cost * cost, math.inf)
        total = best[:, None] + allowed
        origin = total.argmin(axis=0)
        came.append(origin)
        best = total[origin, np.arange(count + 1)]
    cuts = [count]
    for origin in reversed(came):
        cuts.append(int(origin[cuts[-1]]))
    return tuple(reversed(cuts))


def _bottleneck(costs: Sequence[Table]) -> float:
    """The least possible cost of the dearest stage."""
    best = np.full(len(costs[0]), math.inf)
    best[0] = 0.0
    for cost in costs:
        best = np.maximum(best[:, None], cost).min(axis=0)
    return float(best[-1])


def interval_sums(values: Table, fill: float = math.inf) -> Table:
    """The sum of values[i:j] for every i < j, `fill` elsewhere: array [n + 1, n + 1]."""
    total = np.concatenate(([0.0], np.cumsum(values)))
    sums = total - total[:, None]
    sums[np.tril_indices(len(total))] = fill
    return sums


def least_bottleneck(values: Table, stages: int) -> float:
    """The least possible sum of the largest of so many contiguous parts, by bisection over what fits.

    >>> least_bottleneck(np.array([1.0, 1.0, 1.0, 3.0]), 2)
    3.0
    """
    total = np.concatenate(([0.0], np.cumsum(values)))
    low, high = max(float(values.max()), float(total[-1]) / stages), float(total[-1])
    if _parts(total, low) <= stages:
        return low
    while high - low > 1e-4 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _parts(total, middle) <= stages else (middle, high)
    return high


def _parts(total: Table, most: float) -> int:
    """How many parts of at most `most` each the values take, filled greedily."""
    parts, at = 0, 0
    while at < len(total) - 1:
        at = int(np.searchsorted(total, total[at] + most * (1 + 1e-12), side="right")) - 1
        parts += 1
    return parts
