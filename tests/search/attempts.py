"""Solutions of graphs, or the reason why there is none."""

from __future__ import annotations

from autopar.search import CostGraph, Infeasible, NoAssignment, Solution, solve


def attempt(
    graph: CostGraph, method: str, limit: float | None
) -> Solution | Infeasible | NoAssignment:
    """The solution, or the error of a graph that has none within the limit."""
    try:
        return solve(graph, method=method, memory_limit=limit)
    except (Infeasible, NoAssignment) as error:
        return error
