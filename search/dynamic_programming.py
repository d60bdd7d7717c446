"""The exact search: prune, then eliminate variable by variable; with a memory limit, price the bytes and close the gap.

    best(graph) = min over x of  cost(x)                              elimination.py (the order), minplus.py (the joins)
                  subject to  memory(x) <= limit                      memory_limit.py (the price), mixtures.py and labels.py (the gap)

Source: U. Bertele and F. Brioschi, Nonserial Dynamic Programming (1972); H. Everett III, Generalized Lagrange Multiplier
Method (1963). Where exact tables would be too wide or take too long (conditioning.py), narrow ones come first: they mostly find the
same assignment in a hundredth of the time, and the solution's bound below its cost tells whether wider ones are worth their work.
"""

import math

from .conditioning import Minimiser, prepare
from .costgraph import CostGraph, Infeasible, Solution, solution
from .elimination import MAX_ENTRIES
from .memory_limit import constrained
from .pruning import Reduction

NARROW = (1 << 18, 1 << 21)
"""Entries of the tables that are tried, in this order, where exact ones would be too wide or take too long."""
NEAR = 5e-3
"""Relative gap at which wider tables are not worth their work."""
EXACT_WORK = 2e9
"""Additions (a few seconds) above which narrower tables are tried first, and wider ones not at all once something is found."""


def dynamic_programming(graph: CostGraph, *, memory_limit: float | None = None) -> Solution:
    """The optimum, or (too wide a graph, or a tight memory limit on a large one) a solution with a certified gap."""
    return eliminate_variables(graph, memory_limit=memory_limit, max_entries=MAX_ENTRIES)


def eliminate_variables(graph: CostGraph, *, memory_limit: float | None, max_entries: int) -> Solution:
    """`dynamic_programming` with tables of at most `max_entries` entries."""
    small, widest = prepare(graph, max_entries=max_entries, memory=memory_limit is not None)
    if widest.exact and widest.plan.work <= EXACT_WORK:
        return _finished(graph, *_assignment(graph, small, widest, memory_limit))
    best: list[int] | None = None
    cost, bound, work = math.inf, -math.inf, 0.0
    for solver in [*(Minimiser(small.graph, max_entries=width) for width in NARROW if width < max_entries), widest]:
        if best is not None and (solver.plan.work == work or solver.plan.work > EXACT_WORK or cost - bound <= NEAR * abs(cost)):
            continue
        work = solver.plan.work
        try:
            choices, found, certified = _assignment(graph, small, solver, memory_limit)
        except Infeasible:
            # Narrow tables may miss an assignment of little memory.
            if solver is widest:
                raise
            continue
        bound = max(bound, certified)
        if found < cost:
            best, cost = choices, found
    return _finished(graph, best or [], cost, bound)


def _assignment(graph: CostGraph, small: Reduction, solver: Minimiser, limit: float | None) -> tuple[list[int], float, float]:
    """Choices, their cost, and a bound that no assignment within the limit undercuts."""
    if limit is None:
        minimum = solver.minimise()
        choices, bound = minimum.choices, minimum.bound
    else:
        choices, bound = constrained(solver, limit)
    found = small.restore(choices)
    cost = graph.cost(found)
    return found, cost, cost if solver.exact and limit is None else min(bound, cost)


def _finished(graph: CostGraph, choices: list[int], cost: float, bound: float) -> Solution:
    if cost == math.inf:
        raise ValueError("the graph is too wide to eliminate exactly, and no assignment of finite cost was found; forbid less")
    return solution(graph, choices, lower_bound=min(bound, cost), method="dynamic_programming")
