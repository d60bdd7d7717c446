"""Mixtures: some variables from one optimum at the critical price, the rest from another one.

    mixture(k) = first[v] for the first k variables of an arrangement, second[v] for the others

The arrangement walks the graph breadth first from one of its ends. A chain of layers thus lies
layer after layer, and a cut severs few edges. All cuts are priced together: every unary table and
every edge adds a constant to a range of cuts. Where equal layers are indifferent between both
optima (lagrangian.py), a mixture is dearer only by its severed edges.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ..costgraph import CostGraph, memory_tables
from ..tables import Indices, Table

HUB_DEGREE = 8
"""A variable with this many edges is not part of a chain, so the walk does not pass through it."""


def arrangement(graph: CostGraph) -> list[int]:
    """The variables in the order of a breadth-first walk from one end of the graph to the other."""
    degree = Counter(v for edge in graph.edges for v in edge)
    around: list[list[int]] = [[] for _ in graph.sizes]
    for u, v in graph.edges:
        if max(degree[u], degree[v]) < HUB_DEGREE:
            around[u].append(v)
            around[v].append(u)
    count = len(graph.sizes)
    # The last variable of a walk from anywhere is an end of its chain.
    there = _walk(around, range(count - 1, -1, -1))
    return _walk(around, reversed(there))


def _walk(around: Sequence[Sequence[int]], starts: Iterable[int]) -> list[int]:
    seen = [False] * len(around)
    order: list[int] = []
    for start in starts:
        if seen[start]:
            continue
        seen[start] = True
        head = len(order)
        order.append(start)
        while head < len(order):
            for u in around[order[head]]:
                if not seen[u]:
                    seen[u] = True
                    order.append(u)
            head += 1
    return order


def best_cut(
    graph: CostGraph,
    first: Sequence[int],
    second: Sequence[int],
    limit: float,
    order: Sequence[int],
) -> list[int] | None:
    """The cheapest mixture within the limit (None if no cut fits).

    Variables before the cut take their choice from `first`, the others from `second`. `order`: the
    arrangement.
    """
    count = len(order)
    place = np.empty(count, dtype=np.int64)
    place[list(order)] = np.arange(count)
    place_of = place.tolist()
    # Cut k takes the first k places from `first`. An edge costs a third value in the cuts between
    # its ends.
    ranges: list[tuple[int, int, float]] = []
    memory = [0.0] * (count + 1)
    for v, (table, memories) in enumerate(zip(graph.unary, memory_tables(graph), strict=True)):
        at = place_of[v] + 1
        ranges += (0, at, table.item(second[v])), (at, count + 1, table.item(first[v]))
        taken = memories.item(second[v])
        memory[0] += taken
        memory[at] += memories.item(first[v]) - taken
    for (u, v), table in graph.edges.items():
        early = min(place_of[u], place_of[v]) + 1
        late = max(place_of[u], place_of[v]) + 1
        middle = (first[u], second[v]) if place_of[u] < place_of[v] else (second[u], first[v])
        ranges += (
            (0, early, table.item(second[u], second[v])),
            (early, late, table.item(*middle)),
            (late, count + 1, table.item(first[u], first[v])),
        )
    total = _summed(ranges, count + 1)
    # `memory` holds differences from one cut to the next, as each cut moves one variable.
    total[np.cumsum(memory) > limit] = math.inf
    cut = int(total.argmin())
    if total[cut] == math.inf:
        return None
    return [first[v] if place_of[v] < cut else second[v] for v in range(count)]


def _summed(ranges: Sequence[tuple[int, int, float]], count: int) -> Table:
    """For each place, the sum of the values whose range (start, stop) contains it."""
    starts, stops, values = (np.array(column) for column in zip(*ranges, strict=True))
    # Infinite values would cancel to NaN in the running sum, so they are counted apart.
    forbidden = np.isinf(values)

    def spread(chosen: Indices, amounts: Table) -> Table:
        delta = np.bincount(starts[chosen], amounts, count + 1) - np.bincount(
            stops[chosen], amounts, count + 1
        )
        return np.asarray(np.cumsum(delta)[:count])

    total = spread(np.flatnonzero(~forbidden), values[~forbidden])
    total[spread(np.flatnonzero(forbidden), np.ones(int(forbidden.sum()))) > 0.5] = math.inf
    return total
