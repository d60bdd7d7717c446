"""Coordinate descent: each variable in turn takes its best choice given the others.

    x_v <- argmin over c of  unary[v][c] + sum over neighbours u of edge[c, x_u]

The choice stays within the memory that is left. Descent ends when a sweep changes nothing. Source:
J. Besag, On the Statistical Analysis of Dirty Pictures, 1986 (iterated conditional modes).
"""

import math
from collections.abc import Sequence

from ..costgraph import CostGraph
from ..tables import Table

Incidence = list[list[tuple[int, Table]]]


def incidence(graph: CostGraph) -> Incidence:
    """Return each variable's neighbours with the edges' tables.

    The first axis of each table is the variable's own choices.
    """
    around: Incidence = [[] for _ in graph.sizes]
    for (u, v), table in graph.edges.items():
        around[u].append((v, table))
        around[v].append((u, table.T))
    return around


def descend(
    graph: CostGraph,
    start: Sequence[int],
    *,
    price: float = 0.0,
    limit: float | None = None,
    sweeps: int = 4,
) -> list[int]:
    """The assignment at the end of a descent from `start`, of at most `sweeps` sweeps.

    A byte costs `price`. With a `limit` no step takes more memory beyond it.
    """
    choices = list(start)
    around = incidence(graph)
    used = graph.memory_of(choices)
    for _ in range(sweeps):
        changed = False
        for v, neighbours in enumerate(around):
            if graph.sizes[v] == 1:
                continue
            local = graph.unary[v].copy()
            for u, table in neighbours:
                local += table[:, choices[u]]
            old = choices[v]
            memory = graph.memory[v] if graph.memory is not None else None
            if memory is not None:
                local += price * memory
                if limit is not None:
                    # A start over the limit may stay so: only steps that take more bytes are
                    # barred.
                    local[(memory > memory[old]) & (used - memory[old] + memory > limit)] = math.inf
            best = int(local.argmin())
            # Only a strictly better choice, so that equal ones cannot take turns for ever.
            if local[best] < local[old]:
                used += float(memory[best] - memory[old]) if memory is not None else 0.0
                choices[v] = best
                changed = True
        if not changed:
            break
    return choices
