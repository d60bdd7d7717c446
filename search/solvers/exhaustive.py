"""The exhaustive search: every assignment is priced, in blocks; the tests' reference.

best = min over x of  sum_v unary[v][x_v] + sum_uv edges[u, v][x_u, x_v]
subject to            sum_v memory[v][x_v] <= limit
"""

import math

import numpy as np

from ..costgraph import (
    CostGraph,
    Infeasible,
    NoAssignment,
    Proof,
    Solution,
    memory_tables,
    solution,
)
from ..tables import Indices, Table

MAX_ASSIGNMENTS = 10**8
BLOCK = 1 << 16
"""Assignments that are priced together."""


def exhaustive(graph: CostGraph, *, memory_limit: float | None = None) -> Solution:
    """The optimum of all assignments (the first in lexicographic order)."""
    total = math.prod(graph.sizes)
    if total > MAX_ASSIGNMENTS:
        count = f"about 10^{len(str(total)) - 1} assignments"
        raise ValueError(
            f"{count} are too many to enumerate (at most {MAX_ASSIGNMENTS:.0e}); use "
            "dynamic_programming"
        )
    best = 0
    best_cost = math.inf
    least = math.inf
    for start in range(0, total, BLOCK):
        choices = _unravel(np.arange(start, min(start + BLOCK, total)), graph.sizes)
        costs = _price(graph, choices)
        if memory_limit is not None:
            memory = np.asarray(
                sum(
                    (table[c] for table, c in zip(memory_tables(graph), choices, strict=True)),
                    np.zeros(len(costs)),
                )
            )
            # Of allowed assignments alone: the error names a memory that would do.
            least = min(least, float(memory[np.isfinite(costs)].min(initial=math.inf)))
            costs[memory > memory_limit] = math.inf
        # `argmin` and `<` keep the first of equal costs.
        first = int(costs.argmin())
        if costs[first] < best_cost:
            best = start + first
            best_cost = float(costs[first])
    if best_cost == math.inf:
        raise (
            NoAssignment
            if memory_limit is None or least == math.inf
            else Infeasible(least, memory_limit)
        )
    winner = [int(c[0]) for c in _unravel(np.array([best]), graph.sizes)]
    proof = Proof(kind="enumeration", limit=memory_limit)
    return solution(graph, winner, lower_bound=graph.cost(winner), method="exhaustive", proof=proof)


def _unravel(numbers: Indices, sizes: tuple[int, ...]) -> list[Indices]:
    columns: list[Indices] = []
    for size in reversed(sizes):
        numbers, column = np.divmod(numbers, size)
        columns.append(column)
    return columns[::-1]


def _price(graph: CostGraph, choices: list[Indices]) -> Table:
    costs = np.zeros(len(choices[0]) if choices else 1)
    for table, c in zip(graph.unary, choices, strict=True):
        costs += table[c]
    for (u, v), table in graph.edges.items():
        costs += table[choices[u], choices[v]]
    return costs
