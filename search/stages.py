"""Pipeline stages as contiguous cuts of a chain that minimise the time of the slowest stage.

    best[s][j] = min over i < j of  max(best[s - 1][i], cost_s[i, j])          best[0][0] = 0

cost_s[i, j] is the time of stage s for the pieces i to j - 1, infinite if they do not fit its
memory. Among cuts of equal bottleneck the least sum of squares wins, which balances the other
stages, too. Source: PipeDream's partitioner (D. Narayanan et al., SOSP 2019).

The tables hold only intervals of up to D pieces: row j, column c is the interval from piece j - D +
c to piece j - 1.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .tables import Indices, Table

Array = TypeVar("Array", Table, Indices)
T = TypeVar("T")
MOVES = 4
"""The most moves of a cut, on average."""
EXACT = 1e-9
"""The relative precision of a bottleneck found by bisection."""


def partition(costs: Sequence[Table]) -> tuple[int, ...] | None:
    """The cuts 0 = c_0 < c_1 < ... < c_p = n between stages, or None if nothing fits.

    `costs`: a table [n + 1, D] for each stage.

    >>> times = np.array([1.0, 1.0, 1.0, 3.0])
    >>> table = interval_sums(times)
    >>> partition([table, table])
    (0, 3, 4)
    """
    rows, longest = costs[0].shape
    worst = _bottleneck(costs)
    if worst == math.inf:
        return None
    # The second pass minimises the sum of squares over cuts whose stages all stay within the
    # bottleneck.
    padded, windows = _begin(rows, longest)
    squares: list[Table] = []
    before: list[Table] = []
    for square in _of_each(
        costs, lambda cost: np.ascontiguousarray(np.where(cost <= worst, cost * cost, math.inf).T)
    ):
        squares.append(square)
        before.append(padded.copy())
        padded[longest:] = (windows + square).min(axis=0)[:-1]
    # Where a stage begins is looked up for the stages of the cheapest way alone.
    cuts = [rows - 1]
    for values, square in zip(reversed(before), reversed(squares), strict=True):
        stop = cuts[-1]
        cuts.append(
            stop - longest + int((values[stop : stop + longest] + square[:, stop]).argmin())
        )
    return tuple(reversed(cuts))


def least_worst(
    totals: Sequence[Table], reach: Sequence[Indices], *, exact: float = EXACT
) -> float:
    """Return the least time T within which the stages reach the end of the chain.

    It is found by bisection, at most `exact` of it too large; infinite if no T suffices.
    `totals[s]`: array [n + 1], the time of stage s for all pieces before each one. `reach[s]`:
    array [n + 1], the furthest end of stage s from each piece on, which never decreases. So greedy
    stages, each as long as allowed, reach the end if any stages do:

        from i:    min(reach_s[i], the last j with totals_s[j] <= totals_s[i] + T)
    """
    # Plain lists are bisected faster than arrays.
    bounds: list[list[float]] = [*_of_each(totals, lambda total: total.tolist())]
    far: list[list[int]] = [*_of_each(reach, lambda row: row.tolist())]
    last = len(bounds[0]) - 1

    def ends(most: float) -> bool:
        at = 0
        for total, row in zip(bounds, far, strict=True):
            at = min(row[at], bisect.bisect_right(total, total[at] + most, at) - 1)
            if at == last:
                return True
        return False

    # With the longest time of the whole chain only `reach` limits the stages.
    high: float = max(total[-1] for total in bounds)
    if not ends(high):
        return math.inf
    low = 0.0
    while high - low > exact * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if ends(middle) else (middle, high)
    return high


def _bottleneck(costs: Sequence[Table]) -> float:
    """The least possible cost of the most expensive stage."""
    rows, longest = costs[0].shape
    padded, windows = _begin(rows, longest)
    best = math.inf
    for turned in _of_each(costs, lambda cost: np.ascontiguousarray(cost.T)):
        slowest = np.maximum(windows, turned).min(axis=0)
        padded[longest:] = slowest[:-1]
        best = float(slowest[-1])
    return best


def _begin(rows: int, longest: int) -> tuple[Table, Table]:
    """Return the best value up to each cut except the last, behind infinities, and a view of it.

    Column j of the view holds the values of the `longest` cuts before j.
    """
    padded = np.full(longest + rows - 1, math.inf)
    padded[longest] = 0.0
    return padded, sliding_window_view(padded, longest).T


def balance(cuts: Sequence[int], costs: Sequence[Table], devices: int) -> tuple[int, ...]:
    """Move the cuts piece by piece while the load of the fullest device falls.

    Stage k is on device k modulo `devices`. If each device has several stages, the most expensive
    stage alone says little about the fullest device.
    """
    moved = list(cuts)
    longest = costs[0].shape[1]

    def cost(stage: int, start: int, stop: int) -> float:
        return float(costs[stage][stop, start - stop]) if 0 < stop - start <= longest else math.inf

    spent = np.array([cost(stage, *ends) for stage, ends in enumerate(itertools.pairwise(moved))])
    for _ in range(MOVES * len(costs)):
        loads = np.bincount(np.arange(len(costs)) % devices, spent, devices)
        fullest = int(loads.argmax())
        # A move has to gain more than rounding, or moves that undo each other would use up all
        # moves.
        best = float(loads[fullest]) * (1 - 1e-9), 0, (0.0, 0.0), 0
        for stage in range(fullest, len(costs), devices):
            # A piece goes to the stage before, or to the one behind.
            for cut, step in ((stage, 1), (stage + 1, -1)):
                if 0 < cut < len(costs):
                    after = (
                        cost(cut - 1, moved[cut - 1], moved[cut] + step),
                        cost(cut, moved[cut] + step, moved[cut + 1]),
                    )
                    left, right = (
                        float(loads[s % devices] - spent[s]) + a
                        for s, a in zip((cut - 1, cut), after, strict=True)
                    )
                    best = min(best, (max(left, right), cut, after, step))
        _, cut, after, step = best
        if not step:
            break
        moved[cut] += step
        spent[cut - 1 : cut + 1] = after
    return tuple(moved)


def _of_each(arrays: Iterable[Array], function: Callable[[Array], T]) -> Iterator[T]:
    """Yield `function` of every stage's array, worked out once for stages that share theirs."""
    # The caller has all arrays, so that no two of them have one number.
    results: dict[int, T] = {}
    for array in arrays:
        if id(array) not in results:
            results[id(array)] = function(array)
        yield results[id(array)]


def interval_sums(values: Table, longest: int | None = None, fill: float = math.inf) -> Table:
    """Return the sums over all intervals of up to `longest` values (None: of any length).

    `fill` stands where no interval exists.
    """
    width = longest or len(values)
    total = np.concatenate(([0.0], np.cumsum(values)))
    starts = np.arange(len(total))[:, None] - width + np.arange(width)
    return np.where(starts < 0, fill, total[:, None] - total[np.maximum(starts, 0)])


def least_bottleneck(values: Table, stages: int) -> float:
    """The least possible sum of the largest of `stages` contiguous parts, by bisection.

    >>> least_bottleneck(np.array([1.0, 1.0, 1.0, 3.0]), 2)
    3.0
    """
    total = np.concatenate(([0.0], np.cumsum(values)))
    low = max(float(values.max()), float(total[-1]) / stages)
    high = float(total[-1])
    if _parts(total, low) <= stages:
        return low
    # Predicted seconds are known less exactly than this, so a finer bisection would gain nothing.
    while high - low > 1e-4 * high:
        middle = 0.5 * (low + high)
        if _parts(total, middle) <= stages:
            high = middle
        else:
            low = middle
    return high


def _parts(total: Table, most: float) -> int:
    """The number of contiguous parts with sums of at most `most`, filled greedily."""
    parts = 0
    at = 0
    while at < len(total) - 1:
        at = int(np.searchsorted(total, total[at] + most * (1 + 1e-12), side="right")) - 1
        parts += 1
    return parts
