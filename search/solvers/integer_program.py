"""The integer program of a cost graph, solved by HiGHS: the tests' oracle, the benchmark's rival.

    minimise  sum_v unary[v] . x_v  +  sum_uv edges[u, v] . y_uv        x binary, y >= 0
    with      sum_c x_v[c] = 1,   sum_d y_uv[c, d] = x_u[c],   sum_c y_uv[c, d] = x_v[d]
              sum_v memory[v] . x_v <= limit

Source: the local marginal polytope (M. Schlesinger, 1976; T. Werner, A Linear Programming Approach
to Max-sum Problem: A Review, IEEE PAMI 29, 2007), with binary x. HiGHS works with absolute
tolerances, so the costs are scaled first.
"""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

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

METHOD = "integer_program"
LARGEST = 1e4
"""The scaled value of the largest cost."""
INFEASIBLE = 2


class NotSolved(ValueError):
    """HiGHS found no assignment in its time; `lower_bound`: its proven bound."""

    def __init__(self, lower_bound: float, message: str) -> None:
        super().__init__(f"the integer program was not solved: {message}")
        self.lower_bound = lower_bound


def integer_program(
    graph: CostGraph, *, memory_limit: float | None = None, time_limit: float | None = None
) -> Solution:
    """Return the optimum by branch and cut.

    After `time_limit` seconds it is HiGHS' best assignment and bound; `NotSolved` if there is no
    assignment.
    """
    if find_spec("scipy") is None:
        raise ValueError("integer_program needs scipy: pip install scipy")
    program = _program(graph)
    if memory_limit is not None:
        memory_tables(graph)
    if not graph.sizes:
        return solution(
            graph,
            (),
            lower_bound=0.0,
            method=METHOD,
            proof=Proof(kind="enumeration", limit=memory_limit),
        )
    result = program.solve(program.costs, memory_limit, time_limit)
    if result.status == INFEASIBLE:
        raise _why(graph, program, memory_limit)
    scale = program.scale
    bound = result.mip_dual_bound
    lower = bound / scale if bound is not None and math.isfinite(bound) else -math.inf
    if result.x is None:
        raise NotSolved(lower, result.message)
    choices = program.choices(result.x)
    cost = graph.cost(choices)
    # HiGHS' bound of a proven optimum differs from the cost by its tolerances, so the cost is the
    # bound.
    lower = cost if result.status == 0 else min(lower, cost)
    return solution(
        graph,
        choices,
        lower_bound=lower,
        method=METHOD,
        proof=Proof(kind="enumeration", limit=memory_limit),
    )


def _why(graph: CostGraph, program: "_Program", limit: float | None) -> ValueError:
    """The error of an infeasible program: too little memory, or every assignment forbidden."""
    if limit is None:
        return NoAssignment()
    bytes_ = np.zeros(len(program.costs))
    weights = np.concatenate(memory_tables(graph))
    bytes_[: len(weights)] = weights / max(float(weights.max()), 1.0) * LARGEST
    least = program.solve(bytes_, None, None)
    if least.x is None:
        return NoAssignment()
    return Infeasible(graph.memory_of(program.choices(least.x)), limit)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Program:
    """The matrix and vectors of the program.

    Its columns are the variables' choices (from `starts`), then the edges' pairs. `costs` are
    scaled by `scale`; an `upper` of 0 forbids a column.
    """

    sizes: tuple[int, ...]
    starts: Indices
    costs: Table
    upper: Table
    matrix: Any
    right: Table
    memory: Table
    scale: float

    def solve(self, costs: Table, limit: float | None, seconds: float | None) -> Any:
        """The result of `scipy.optimize.milp`."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        constraints = [LinearConstraint(self.matrix, self.right, self.right)]
        if limit is not None:
            # In units of the largest choice: HiGHS' feasibility tolerance is absolute, and in bytes
            # it would be below the rounding of gigabytes.
            unit = max(float(self.memory.max()), 1.0)
            row = np.zeros((1, len(costs)))
            row[0, : len(self.memory)] = self.memory / unit
            constraints.append(LinearConstraint(csr_array(row), -np.inf, limit / unit))
        # With integral choices the pairs y of an edge are integral on their own: they are the
        # product of two unit vectors. Fewer integral columns leave HiGHS fewer to branch on.
        integral = (np.arange(len(costs)) < self.starts[-1]).astype(int)
        options: dict[str, float] = {"mip_rel_gap": 0.0}
        if seconds is not None:
            options["time_limit"] = seconds
        return milp(
            costs,
            constraints=constraints,
            integrality=integral,
            bounds=Bounds(0.0, self.upper),
            options=options,
        )

    def choices(self, x: Table) -> list[int]:
        """The choice of each variable."""
        return [
            int(x[start : start + size].argmax())
            for start, size in zip(self.starts, self.sizes, strict=False)
        ]


def _program(graph: CostGraph) -> _Program:
    from scipy.sparse import csr_array

    starts = np.concatenate([[0], np.cumsum(graph.sizes)]).astype(np.int64)
    costs = [*graph.unary]
    # One line for each variable (its choices add up to 1), then for each end of an edge one line a
    # choice.
    rows = [np.repeat(np.arange(len(graph.sizes)), graph.sizes)]
    columns = [np.arange(starts[-1])]
    values = [np.ones(starts[-1])]
    row = len(graph.sizes)
    column = int(starts[-1])
    for (u, v), table in graph.edges.items():
        costs.append(table.reshape(-1))
        pairs = column + np.arange(table.size).reshape(table.shape)
        for end, axis in ((u, 0), (v, 1)):
            lines = row + np.arange(graph.sizes[end])
            rows += [
                np.broadcast_to(lines[:, None] if axis == 0 else lines, table.shape).reshape(-1),
                lines,
            ]
            columns += [pairs.reshape(-1), starts[end] + np.arange(graph.sizes[end])]
            values += [np.ones(table.size), -np.ones(graph.sizes[end])]
            row += graph.sizes[end]
        column += table.size
    cost = np.concatenate([np.zeros(0), *costs])
    allowed = np.isfinite(cost)
    scale = LARGEST / max(float(np.abs(cost[allowed]).max(initial=0.0)), 1e-300)
    where = (np.concatenate(rows), np.concatenate(columns))
    memory = np.concatenate(graph.memory) if graph.memory else np.zeros(0)
    return _Program(
        sizes=graph.sizes,
        starts=starts,
        costs=np.where(allowed, cost, 0.0) * scale,
        upper=allowed.astype(float),
        matrix=csr_array((np.concatenate(values), where), shape=(row, column)),
        right=(np.arange(row) < len(graph.sizes)).astype(float),
        memory=memory,
        scale=scale,
    )
