"""Assignments of ever less memory, each the cheapest known of so many bytes: a set that depends on no limit.

    argmin over x of  cost(x) + p memory(x)        for the prices p of a byte at which neighbours on the hull cross

The first is the optimum without a limit, the last has the least memory. Between two neighbours on the hull of (memory, cost), where these
are further apart than a step, lie mixtures of both (mixtures.py).
"""

from collections.abc import Iterator

from .conditioning import Minimiser, Minimum, prepared
from .costgraph import CostGraph, Proof, Solution, memory_tables, solution
from .lagrangian import TOLERANCE, least_memory
from .lines import Point, point
from .local_search import descend
from .mixtures import arrangement, best_cut
from .relaxation import ENTRIES

STEP, NEAR = 0.96, 0.99
"""The share of an assignment's memory that the next one is to have, or more, and the same of its cost; and the share of its memory that is
near enough whatever it costs."""
METHOD = "lagrangian"


def frontier(graph: CostGraph, *, step: float = STEP) -> Iterator[Solution]:
    """Assignments with falling memory and rising cost, found as they are asked for; raises `NoAssignment`. `step`: below 1."""
    assert step < 1.0
    memory_tables(graph)
    small, solver = prepared(graph, max_entries=ENTRIES)
    free = solver.minimise()
    pruned = any(substitutes is not None for substitutes in small.substitutes)

    def told(found: Point) -> Solution:
        choices = small.restore(found.choices)
        proof = Proof(kind="messages", limit=None, price=0.0, max_entries=solver.max_entries, pruned=pruned)
        return solution(graph, choices, lower_bound=min(free.bound, graph.cost(choices)), method=METHOD, proof=proof)

    first = point(small.graph, free.choices)
    yield told(first)
    last, least = first, point(small.graph, least_memory(small.graph, max_entries=solver.max_entries))
    for found in _between(solver, free, first, least, step):
        if found.memory < last.memory:
            yield told(found)
            last = found


def _between(solver: Minimiser, free: Minimum, over: Point, within: Point, step: float) -> Iterator[Point]:
    """What is found behind one point, up to another, in the order of falling memory."""
    if within.memory >= over.memory:
        return
    far = within.memory < step * over.memory or (within.cost > over.cost / step and within.memory < NEAR * over.memory)
    if far and within.cost > over.cost:
        price = (within.cost - over.cost) / (over.memory - within.memory)
        found = point(solver.graph, solver.minimise(price, free).choices)
        line = over.cost + price * over.memory
        if found.cost + price * found.memory < line - TOLERANCE * abs(line) and over.memory > found.memory > within.memory:
            yield from _between(solver, free, over, found, step)
            yield from _between(solver, free, found, within, step)
            return
        yield from _mixtures(solver.graph, over, within, step)
    yield within


def _mixtures(graph: CostGraph, over: Point, within: Point, step: float) -> Iterator[Point]:
    """Mixtures of two neighbours on the hull, of ever less memory."""
    order = arrangement(graph)
    limit = max(step * over.memory, 0.5 * (over.memory + within.memory))
    while limit > within.memory:
        best = within
        for one, other in ((over, within), (within, over)):
            mixed = best_cut(graph, one.choices, other.choices, limit, order)
            if mixed is not None:
                best = min(best, point(graph, descend(graph, mixed, limit=limit)), key=lambda found: found.cost)
        if best.cost >= within.cost:
            return
        yield best
        limit = step * min(limit, best.memory)
