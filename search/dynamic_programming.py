"""The exact search: prune, then eliminate variable by variable; with a memory limit, price the bytes and close the gap.

    best(graph) = min over x of  cost(x)                              elimination.py (the order), minplus.py (the joins)
                  subject to  memory(x) <= limit                      memory_limit.py (the price), mixtures.py and labels.py (the gap)

Source: U. Bertele and F. Brioschi, Nonserial Dynamic Programming (1972); H. Everett III, Generalized Lagrange Multiplier
Method (1963). Where a graph is too wide for exact tables (conditioning.py), the solution's bound is below its cost.
"""

import math

from .conditioning import prepare
from .costgraph import CostGraph, Solution, solution
from .elimination import MAX_ENTRIES
from .memory_limit import constrained


def dynamic_programming(graph: CostGraph, *, memory_limit: float | None = None) -> Solution:
    """The optimum, or (too wide a graph, or a tight memory limit on a large one) a solution with a certified gap."""
    return eliminate_variables(graph, memory_limit=memory_limit, max_entries=MAX_ENTRIES)


def eliminate_variables(graph: CostGraph, *, memory_limit: float | None, max_entries: int) -> Solution:
    """`dynamic_programming` with tables of at most `max_entries` entries."""
    small, solver = prepare(graph, max_entries=max_entries, memory=memory_limit is not None)
    if memory_limit is None:
        best = solver.minimise()
        choices, bound = best.choices, best.bound
    else:
        choices, bound = constrained(solver, memory_limit)
    found = small.restore(choices)
    cost = graph.cost(found)
    if cost == math.inf:
        raise ValueError("the graph is too wide to eliminate exactly, and no assignment of finite cost was found; forbid less")
    bound = cost if solver.exact and memory_limit is None else min(bound, cost)
    return solution(graph, found, lower_bound=bound, method="dynamic_programming")
