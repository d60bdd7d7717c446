"""Mixtures: where two assignments cost the same at the critical price, a part of the variables from one and the rest from the other.

    mixture(k) = first[v] for the first k variables of a linear arrangement, second[v] for the others

The arrangement walks the graph breadth first from one of its ends, so that a chain of layers lies layer after layer and a cut
severs few edges. All cuts are priced together: every unary table and edge adds a constant to a range of them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from .costgraph import CostGraph, Indices, Table, memory_tables

HUB_DEGREE = 8
"""A variable of so many edges is no place in a chain: the walk does not pass through it."""


def arrangement(graph: CostGraph) -> list[int]:
    """The variables in the order of a breadth-first walk from one end of the graph to the other."""
    degree = Counter(v for edge in graph.edges for v in edge)
    around: list[list[int]] = [[] for _ in graph.sizes]
    for u, v in graph.edges:
        if max(degree[u], degree[v]) < HUB_DEGREE:
            around[u].append(v)
            around[v].append(u)
    count = len(graph.sizes)
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


def best_cut(graph: CostGraph, first: Sequence[int], second: Sequence[int], limit: float, order: Sequence[int]) -> list[int] | None:
    """The cheapest mixture within the limit: the variables before the cut choose as in `first`, the others as in `second`."""
    count = len(order)
    place = np.empty(count, dtype=np.int64)
    place[list(order)] = np.arange(count)
    place_of = place.tolist()
    ranges: list[tuple[int, int, float]] = []
    memory = np.zeros(count + 1)
    for v, (table, memories) in enumerate(zip(graph.unary, memory_tables(graph), strict=True)):
        at = place_of[v] + 1
        ranges += (0, at, float(table[second[v]])), (at, count + 1, float(table[first[v]]))
        memory[0] += memories[second[v]]
        memory[at] += memories[first[v]] - memories[second[v]]
    for (u, v), table in graph.edges.items():
        early, late = sorted((place_of[u] + 1, place_of[v] + 1))
        middle = table[first[u], second[v]] if place_of[u] < place_of[v] else table[second[u], first[v]]
        ranges += (
            (0, early, float(table[second[u], second[v]])),
            (early, late, float(middle)),
            (late, count + 1, float(table[first[u], first[v]])),
        )
    total = _summed(ranges, count + 1)
    total[np.cumsum(memory) > limit] = math.inf
    cut = int(total.argmin())
    if total[cut] == math.inf:
        return None
    return [first[v] if place_of[v] < cut else second[v] for v in range(count)]


def _summed(ranges: Sequence[tuple[int, int, float]], count: int) -> Table:
    """For each place the sum of the values whose range (start, stop) holds it."""
    starts, stops, values = (np.array(column) for column in zip(*ranges, strict=True))
    forbidden = np.isinf(values)

    def spread(chosen: Indices, amounts: Table) -> Table:
        delta = np.bincount(starts[chosen], amounts, count + 1) - np.bincount(stops[chosen], amounts, count + 1)
        return np.asarray(np.cumsum(delta)[:count])

    total = spread(np.flatnonzero(~forbidden), values[~forbidden])
    total[spread(np.flatnonzero(forbidden), np.ones(int(forbidden.sum()))) > 0.5] = math.inf
    return total
