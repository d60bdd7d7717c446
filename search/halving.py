"""Branch and bound on bytes: the choices of little and of much memory of one variable are bounded apart.

    bound(node) = the Lagrangian bound of the graph with the node's choices        bound = min over the open nodes

The next node is the one with the least bound. Its dual has two sides, one assignment over the limit and one within it.
The node is halved at the variable whose bytes differ most between the sides: choices up to the mean of these bytes make
one child, the others the second one.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .conditioning import Minimiser, prepare, restrict
from .costgraph import Indices, Infeasible, NoAssignment, memory_tables
from .lagrangian import Dual, Report, dual_of
from .lines import Point, point

NODES = 16
"""The largest number of nodes to open."""
GOAL = 5e-3
"""The relative gap at which the search ends."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Node:
    """The remaining choices, and the two sides of the dual, as choices of the whole graph."""

    kept: list[Indices]
    over: list[int]
    within: list[int]


def halve(solver: Minimiser, limit: float, dual: Dual, best: Point, cutoff: float, report: Report) -> tuple[Point, float]:
    """The best assignment and a bound, after at most `NODES` nodes."""
    graph = solver.graph
    root = _Node(kept=[np.arange(size) for size in graph.sizes], over=dual.over.choices, within=dual.within.choices)
    heap = [(dual.bound, 0, root)]
    count = 0
    while heap and count < NODES:
        # The least open bound is the bound of all: stop once it is near the best cost.
        bound, _, node = heap[0]
        target = min(best.cost, cutoff)
        if target - bound <= GOAL * abs(target):
            break
        children = _children(solver, node)
        if not children:
            break
        heapq.heappop(heap)
        for kept in children:
            count += 1
            try:
                small, child = prepare(restrict(graph, kept), max_entries=solver.max_entries)
                inner, found, value = dual_of(child, limit, close=GOAL / 4)
            except (Infeasible, NoAssignment):
                continue  # the child is empty, and bounds nothing
            best = min(best, point(graph, _whole(kept, small.restore(found.choices))), key=lambda each: each.cost)
            sides = (found, found) if inner is None else (inner.over, inner.within)
            over, within = (_whole(kept, small.restore(side.choices)) for side in sides)
            heapq.heappush(heap, (max(bound, value), count, _Node(kept=kept, over=over, within=within)))
        report(best.choices, dual.bound, dual.price)
    return best, min([min(best.cost, cutoff), *(entry[0] for entry in heap)])


def _whole(kept: Sequence[Indices], choices: Sequence[int]) -> list[int]:
    return [int(keep[choice]) for keep, choice in zip(kept, choices, strict=True)]


def _children(solver: Minimiser, node: _Node) -> list[list[Indices]]:
    """The node's halves at the variable of most different bytes; none if the sides have equal bytes everywhere."""
    memory = memory_tables(solver.graph)
    bytes_ = [(float(table[o]), float(table[w])) for table, o, w in zip(memory, node.over, node.within, strict=True)]
    v = max(range(len(bytes_)), key=lambda u: abs(bytes_[u][0] - bytes_[u][1]), default=-1)
    if v < 0 or bytes_[v][0] == bytes_[v][1]:
        return []
    thrifty = memory[v][node.kept[v]] <= sum(bytes_[v]) / 2
    halves = [node.kept[v][thrifty], node.kept[v][~thrifty]]
    return [[*node.kept[:v], half, *node.kept[v + 1 :]] for half in halves if len(half)]
