"""The quick search under a memory limit: the Lagrangian dual, and the mixtures at its price.

    bound  =  max over p >= 0 of  min over x of  cost(x) + p * (memory(x) - limit)

Mixtures of equal layers are nearly optimal at the critical price (memory/lagrangian.py), so the gap
is mostly below a percent. Nothing is enumerated to close it. Source: H. Everett III, Generalized
Lagrange Multiplier Method, 1963.
"""

from ..costgraph import CostGraph, Proof, Solution, memory_tables, solution
from ..elimination.conditioning import prepared
from ..memory.lagrangian import ENTRIES, dual_of
from ..memory.lines import lines_of
from .dynamic_programming import dynamic_programming

METHOD = "lagrangian"
CLOSE = 2e-3
"""The relative gap at which the search for a price ends."""


def lagrangian(graph: CostGraph, *, memory_limit: float | None = None) -> Solution:
    """Return a good solution within the limit, with a certified gap.

    Without a limit it is that of the exact search.
    """
    if memory_limit is None:
        return dynamic_programming(graph)
    memory_tables(graph)
    small, solver = prepared(graph, max_entries=ENTRIES)
    dual, best, bound = dual_of(
        solver, memory_limit, close=CLOSE, known=lines_of(graph), rough=CLOSE / 2
    )
    choices = small.restore(best.choices)
    pruned = any(substitutes is not None for substitutes in small.substitutes)
    price = dual.price if dual is not None else 0.0
    kind = "messages+price" if price else "messages"
    proof = Proof(
        kind=kind, limit=memory_limit, price=price, max_entries=solver.max_entries, pruned=pruned
    )
    return solution(
        graph, choices, lower_bound=min(bound, graph.cost(choices)), method=METHOD, proof=proof
    )
