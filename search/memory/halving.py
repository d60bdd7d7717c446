"""Branch and bound on bytes: choices of little and of much memory are bounded apart.

    bound(node) = the Lagrangian bound of the graph with the node's choices
    bound       = min over the open nodes

The next node is the one with the least bound. Its dual has two sides, one assignment over the limit
and one within it. The node is halved at the variable whose bytes differ most between the sides:
choices up to the mean of these bytes make one child, the others the second one. The search ends
with a small gap, after some nodes, or once the work of their dual is spent; its bound holds in any
case. As in A. Land and A. Doig, An Automatic Method of Solving Discrete Programming Problems,
Econometrica 28, 1960, with the least bound first as in E. Lawler and D. Wood, Branch-and-Bound
Methods, 1966.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..costgraph import Infeasible, NoAssignment, memory_tables
from ..elimination.conditioning import Minimiser, prepare
from ..elimination.derived_graphs import restrict
from ..tables import Indices
from .lagrangian import Dual, Report, dual_of
from .lines import Lines, Point, point

NODES = 16
"""The largest number of nodes to open."""
WORK = 2e9
"""Additions after which no further node is opened."""
GOAL = 5e-3
"""The relative gap at which the search ends."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """The remaining choices, the best price of a byte with them, and the two sides of the dual, as
    choices of the whole graph.
    """

    remaining: list[Indices]
    price: float
    over: list[int]
    within: list[int]


def halve(
    solver: Minimiser, limit: float, dual: Dual, best: Point, cutoff: float, report: Report
) -> tuple[Point, float]:
    """The best assignment and a bound, after at most `NODES` nodes or `WORK` additions."""
    graph = solver.graph
    root = Node(
        remaining=[np.arange(size) for size in graph.sizes],
        price=dual.price,
        over=dual.over.choices,
        within=dual.within.choices,
    )
    heap = [(dual.bound, 0, root)]
    count = 0
    work = 0.0
    while heap and count < NODES and work < WORK:
        # The least open bound is the bound of all: stop once it is near the best cost.
        bound, _, node = heap[0]
        target = min(best.cost, cutoff)
        if target - bound <= GOAL * abs(target):
            break
        children = children_of(solver, node)
        if not children:
            break
        heapq.heappop(heap)
        for remaining in children:
            # Each half takes a dual, whether it is looked at later or not.
            count += 1
            # The best price of a child is near its parent's.
            known = Lines(start=node.price)
            try:
                small, child = prepare(restrict(graph, remaining), max_entries=solver.max_entries)
                # Four times nearer than the goal, so that the inner gap does not decide whether the
                # goal is reached.
                inner, fitting, value = dual_of(child, limit, close=GOAL / 4, known=known)
            except (Infeasible, NoAssignment):
                continue  # the child is empty, and bounds nothing
            work += len(known.tried) * child.plan.work
            best = min(
                best,
                point(graph, _whole(remaining, small.restore(fitting.choices))),
                key=lambda each: each.cost,
            )
            # A child whose optimum without a limit fits is not halved: equal sides have no
            # children.
            sides = (fitting, fitting) if inner is None else (inner.over, inner.within)
            over, within = (_whole(remaining, small.restore(side.choices)) for side in sides)
            price = node.price if inner is None else inner.price
            # The parent's bound holds for its children too, and may be the higher of the two.
            heapq.heappush(
                heap,
                (
                    max(bound, value),
                    count,
                    Node(remaining=remaining, price=price, over=over, within=within),
                ),
            )
        report(best.choices, dual.bound, dual.price)
    # The open nodes hold every assignment within the limit. A bound above the target is of no use.
    return best, min([min(best.cost, cutoff), *(entry[0] for entry in heap)])


def _whole(remaining: Sequence[Indices], choices: Sequence[int]) -> list[int]:
    return [int(indices[choice]) for indices, choice in zip(remaining, choices, strict=True)]


def children_of(solver: Minimiser, node: Node) -> list[list[Indices]]:
    """Return the node's halves at the variable of most different bytes.

    There are none if the sides have equal bytes everywhere.
    """
    memory = memory_tables(solver.graph)
    bytes_ = [
        (float(table[o]), float(table[w]))
        for table, o, w in zip(memory, node.over, node.within, strict=True)
    ]
    # At the best price the sides differ in exactly what the price cannot decide. Where most bytes
    # are undecided, a decision moves both children's duals the most.
    v = max(range(len(bytes_)), key=lambda u: abs(bytes_[u][0] - bytes_[u][1]), default=-1)
    if v < 0 or bytes_[v][0] == bytes_[v][1]:
        return []
    thrifty = memory[v][node.remaining[v]] <= sum(bytes_[v]) / 2
    halves = [node.remaining[v][thrifty], node.remaining[v][~thrifty]]
    return [[*node.remaining[:v], half, *node.remaining[v + 1 :]] for half in halves if len(half)]
