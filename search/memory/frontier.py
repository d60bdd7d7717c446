"""Assignments of ever less memory, each the cheapest known of so many bytes, for any limit.

    argmin over x of  cost(x) + p memory(x)    at the prices p where neighbours on the hull cross

The first is the optimum without a limit, the last has the least memory. Between two neighbours on
the hull of (memory, cost), where these are further apart than a step, lie mixtures of both
(mixtures.py). Source: the prices are those of lagrangian.py (H. Everett III, 1963); the order of
the crossings is that of a dichotomic search for supported points (Y. Aneja and K. Nair, Bicriteria
Transportation Problem, Management Science 25, 1979).
"""

from collections.abc import Iterator

from ..costgraph import CostGraph, Proof, Solution, memory_tables, solution
from ..elimination.conditioning import Minimiser, Minimum, prepared
from ..elimination.local_search import descend
from .lagrangian import ENTRIES, TOLERANCE, least_memory
from .lines import Point, point
from .mixtures import arrangement, best_cut

STEP = 0.96
"""Neighbours are near enough if memory or cost differ by less than this ratio."""
NEAR = 0.99
"""Neighbours whose memory differs by less than this ratio are near enough whatever they cost."""
METHOD = "lagrangian"


def frontier(graph: CostGraph, *, step: float = STEP) -> Iterator[Solution]:
    """Yield assignments with falling memory and rising cost, each made when it is asked for.

    `step`: the share, below 1, of an assignment's memory that the next one is to have or less.
    Raises `NoAssignment`.
    """
    assert step < 1.0
    memory_tables(graph)
    small, solver = prepared(graph, max_entries=ENTRIES)
    free = solver.minimise()
    pruned = any(substitutes is not None for substitutes in small.substitutes)

    # The bound of a graph without a limit also holds within every limit, so all points share it.
    def told(known: Point) -> Solution:
        choices = small.restore(known.choices)
        proof = Proof(
            kind="messages", limit=None, price=0.0, max_entries=solver.max_entries, pruned=pruned
        )
        return solution(
            graph,
            choices,
            lower_bound=min(free.bound, graph.cost(choices)),
            method=METHOD,
            proof=proof,
        )

    first = point(small.graph, free.choices)
    yield told(first)
    last = first
    least = point(small.graph, least_memory(small.graph, max_entries=solver.max_entries))
    # A mixture's descent may end below the memory of the hull's next point. That point is then left
    # out, as callers rely on falling memory.
    for further in _between(solver, free, first, least, step):
        if further.memory < last.memory:
            yield told(further)
            last = further


def _between(
    solver: Minimiser, free: Minimum, over: Point, within: Point, step: float
) -> Iterator[Point]:
    """Yield the points between two of them, in the order of falling memory."""
    if within.memory >= over.memory:
        return
    far = within.memory < step * over.memory or (
        within.cost > over.cost / step and within.memory < NEAR * over.memory
    )
    if far and within.cost > over.cost:
        price = (within.cost - over.cost) / (over.memory - within.memory)
        lowest = point(solver.graph, solver.minimise(price, free).choices)
        line = over.cost + price * over.memory
        if (
            lowest.cost + price * lowest.memory < line - TOLERANCE * abs(line)
            and over.memory > lowest.memory > within.memory
        ):
            yield from _between(solver, free, over, lowest, step)
            yield from _between(solver, free, lowest, within, step)
            return
        # Nothing lies below the line through both, so they are neighbours on the hull, and only
        # mixtures, which lie above it, are left between them.
        yield from _mixtures(solver.graph, over, within, step)
    yield within


def _mixtures(graph: CostGraph, over: Point, within: Point, step: float) -> Iterator[Point]:
    """Mixtures of two neighbours on the hull, of ever less memory."""
    order = arrangement(graph)
    # Not below the middle, so that neighbours little more than a step apart get one mixture in the
    # middle instead of one close to `within`.
    limit = max(step * over.memory, 0.5 * (over.memory + within.memory))
    while limit > within.memory:
        best = within
        for one, other in ((over, within), (within, over)):
            mixed = best_cut(graph, one.choices, other.choices, limit, order)
            if mixed is not None:
                best = min(
                    best,
                    point(graph, descend(graph, mixed, limit=limit)),
                    key=lambda candidate: candidate.cost,
                )
        if best.cost >= within.cost:
            return
        yield best
        limit = step * min(limit, best.memory)
