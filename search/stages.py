"""Pipeline stages as contiguous cuts of a chain: the slowest stage as fast as it can be.

    best[s][j] = min over i < j of  max(best[s - 1][i], cost_s[i, j])          best[0][0] = 0

cost_s[i, j] is what stage s takes for the pieces i to j - 1 (infinite where they do not fit its memory). Of equally good cuts the sum of
squares decides, so that the other stages are balanced too. Source: PipeDream's partitioner (D. Narayanan et al., SOSP 2019).

Only intervals of up to D pieces are in the tables: row j, column c is the interval from piece j - D + c to piece j - 1.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .costgraph import Indices, Table

MOVES = 4
"""Moves of each cut, at most, on the average."""
EXACT = 1e-9
"""Share of a bottleneck up to which bisection finds it."""


def partition(costs: Sequence[Table]) -> tuple[int, ...] | None:
    """The cuts 0 = c_0 < c_1 < ... < c_p = n between stages, given a table [n + 1, D] for each stage; None where nothing fits.

    >>> times = np.array([1.0, 1.0, 1.0, 3.0])
    >>> table = interval_sums(times)
    >>> partition([table, table])
    (0, 3, 4)
    """
    rows, longest = costs[0].shape
    worst = _bottleneck(costs)
    if worst == math.inf:
        return None
    before, windows = _begin(rows, longest)
    came: list[Indices] = []
    for cost in costs:
        total = windows + np.where(cost <= worst, cost * cost, math.inf)
        origin = total.argmin(axis=1)
        came.append(np.arange(rows) - longest + origin)
        before[:] = total[np.arange(rows), origin][:-1]
    cuts = [rows - 1]
    for starts in reversed(came):
        cuts.append(int(starts[cuts[-1]]))
    return tuple(reversed(cuts))


def least_worst(totals: Sequence[Table], reach: Sequence[Indices]) -> float:
    """The least bound T under which stages get to the end of the chain, by bisection; infinite where they do not under any.

    `totals[s]`: array [n + 1], what stage s takes for the pieces before each. `reach[s]`: array [n + 1], how far stage s gets at most from
    each piece on, never less far from a later one; so the end is reached if it is by stages that take as many pieces as they may:

        from i:    min(reach_s[i], the last j with totals_s[j] <= totals_s[i] + T)
    """
    bounds = [total.tolist() for total in totals]
    far = [row.tolist() for row in reach]

    def ends(most: float) -> bool:
        at = 0
        for total, row in zip(bounds, far, strict=True):
            at = min(row[at], bisect.bisect_right(total, total[at] + most) - 1)
        return bool(at == len(bounds[0]) - 1)

    high: float = max(total[-1] for total in bounds)
    if not ends(high):
        return math.inf
    low = 0.0
    while high - low > EXACT * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if ends(middle) else (middle, high)
    return high


def _bottleneck(costs: Sequence[Table]) -> float:
    """The least possible cost of the dearest stage."""
    rows, longest = costs[0].shape
    before, windows = _begin(rows, longest)
    best = math.inf
    for cost in costs:
        found = np.maximum(windows, cost).min(axis=1)
        before[:], best = found[:-1], float(found[-1])
    return best


def _begin(rows: int, longest: int) -> tuple[Table, Table]:
    """What is best up to each cut before the last, and a view of it: row j holds it for each of the `longest` cuts before j."""
    padded = np.full(longest + rows - 1, math.inf)
    padded[longest] = 0.0
    return padded[longest:], sliding_window_view(padded, longest)


def balance(cuts: Sequence[int], costs: Sequence[Table], devices: int) -> tuple[int, ...]:
    """Cuts moved piece by piece while the load of the fullest device falls, where stage k lies on device k modulo `devices`.

    The dearest stage says little of the fullest device where each holds several stages.
    """
    found, longest = list(cuts), costs[0].shape[1]

    def cost(stage: int, start: int, stop: int) -> float:
        return float(costs[stage][stop, start - stop]) if 0 < stop - start <= longest else math.inf

    spent = np.array([cost(stage, *ends) for stage, ends in enumerate(itertools.pairwise(found))])
    for _ in range(MOVES * len(costs)):
        loads = np.bincount(np.arange(len(costs)) % devices, spent, devices)
        fullest = int(loads.argmax())
        best = float(loads[fullest]) * (1 - 1e-9), 0, (0.0, 0.0), 0
        for stage in range(fullest, len(costs), devices):
            # A piece goes to the stage before, or to the one behind.
            for cut, step in ((stage, 1), (stage + 1, -1)):
                if 0 < cut < len(costs):
                    after = cost(cut - 1, found[cut - 1], found[cut] + step), cost(cut, found[cut] + step, found[cut + 1])
                    left, right = (float(loads[s % devices] - spent[s]) + a for s, a in zip((cut - 1, cut), after, strict=True))
                    best = min(best, (max(left, right), cut, after, step))
        _, cut, after, step = best
        if not step:
            break
        found[cut] += step
        spent[cut - 1 : cut + 1] = after
    return tuple(found)


def interval_sums(values: Table, longest: int | None = None, fill: float = math.inf) -> Table:
    """The sums over all intervals of up to `longest` values (None: of any number), `fill` for those that there are not."""
    width = longest or len(values)
    total = np.concatenate(([0.0], np.cumsum(values)))
    starts = np.arange(len(total))[:, None] - width + np.arange(width)
    return np.where(starts < 0, fill, total[:, None] - total[np.maximum(starts, 0)])


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
