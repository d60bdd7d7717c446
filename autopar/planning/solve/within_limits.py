"""Solves tables within the memory of devices and hosts, by the requested method."""

from __future__ import annotations

import math

from autopar.errors import UsageError
from autopar.planning.tables.tables import Tables
from autopar.search import CostGraph, Infeasible, NoAssignment, Solution, solve

from .host_memory import solve_within_hosts

EXACT_METHOD = "dynamic_programming"
QUICK_METHOD = "lagrangian"
ENOUGH = 1e-2
"""The largest gap at which the quick method's solution under a memory limit replaces the exact
method's.
"""


def quick_method(method: str) -> str:
    """Return the method that ranks what `method` solves at the end: the quick one for the exact."""
    return QUICK_METHOD if method == EXACT_METHOD else method


def solve_within(
    tables: Tables, method: str, memory_limit: float, *, enough: float = math.inf
) -> Solution:
    """Solve tables within a memory limit (infinite: none); the quick method comes first, and is
    exact enough mostly.

    It is so, too, where it proves that no solution takes less than `enough` seconds.
    """
    bound = memory_limit if memory_limit < math.inf else None

    def solved(graph: CostGraph) -> Solution:
        if method == EXACT_METHOD and bound is not None:
            quick = solve(graph, method=QUICK_METHOD, memory_limit=bound)
            if quick.gap <= ENOUGH or quick.lower_bound >= enough:
                return quick
        return solve(graph, method=method, memory_limit=bound)

    try:
        return solve_within_hosts(tables, solved, memory_limit)
    # These are ValueErrors as well, but no mistakes in the choice of a method.
    except (Infeasible, NoAssignment):
        raise
    except ValueError as error:
        raise UsageError(f"--search {method}: {error}") from error
