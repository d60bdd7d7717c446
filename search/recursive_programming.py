"""The near-linear search: one mesh axis at a time, heaviest variables first, then coordinate descent.

Double recursion (H. Wang et al., Efficient and Systematic Partitioning of Large and Deep Neural Networks for Parallelization,
Euro-Par 2021): for each axis a, a variable may take the choices that agree with what it chose on the axes before a and that do not
split on the axes after a; v chooses, after all heavier ones,

    x_v = argmin over c of  unary[c] + sum over decided u of edge[c, x_u] + sum over open u of  min over their candidates y of edge[c, y]
"""

import math

import numpy as np

from .conditioning import soften
from .costgraph import CostGraph, Indices, Infeasible, Proof, Solution, Table, memory_tables, shared_map, solution
from .local_search import Incidence, descend, incidence
from .memory_limit import least_memory

METHOD = "recursive_programming"
BISECTIONS = 12
DOUBLINGS = 60


def recursive_programming(graph: CostGraph, *, memory_limit: float | None = None) -> Solution:
    """A good solution fast, with a cheap lower bound: the sum of all tables' least entries."""
    search = _Recursion(graph)
    bound = math.fsum(float(search.least(table).min()) for table in (*graph.unary, *graph.edges.values()))
    if memory_limit is None:
        choices = search.run(0.0, None)
    else:
        memory_tables(graph)
        choices = _within(search, memory_limit)
    if graph.cost(choices) == math.inf or (memory_limit is not None and graph.memory_of(choices) > memory_limit):
        rescue = least_memory(graph)
        if memory_limit is not None and graph.memory_of(rescue) > memory_limit:
            raise Infeasible(graph.memory_of(rescue), memory_limit)
        choices = descend(graph, rescue, limit=memory_limit)
    proof = Proof(kind="minima", limit=memory_limit)
    return solution(graph, choices, lower_bound=min(bound, graph.cost(choices)), method=METHOD, proof=proof)


def _within(search: "_Recursion", limit: float) -> list[int]:
    """Raise the price of a byte until the assignment fits, then lower it by bisection; the cheapest that fits."""
    graph = search.graph
    choices = search.run(0.0, limit)
    if graph.memory_of(choices) <= limit:
        return choices
    low, high = 0.0, max(abs(search.soft.cost(choices)), 1e-300) / graph.memory_of(choices)
    fitting: list[list[int]] = []
    for _ in range(DOUBLINGS):
        choices = search.run(high, limit)
        if graph.memory_of(choices) <= limit:
            fitting.append(choices)
            break
        low, high = high, 2.0 * high
    for _ in range(BISECTIONS if fitting else 0):
        middle = 0.5 * (low + high)
        tried = search.run(middle, limit)
        if graph.memory_of(tried) <= limit:
            fitting.append(tried)
            high = middle
        else:
            low = middle
    return min(fitting, key=graph.cost, default=choices)


class _Recursion:
    """The parts of the graph that no price changes."""

    def __init__(self, graph: CostGraph) -> None:
        self.graph = graph
        self.soft = soften(graph)
        self.around: Incidence = incidence(self.soft)
        self.least = shared_map(lambda table: table.min(keepdims=True))
        self.order = self._order()
        width = graph.digits[0].shape[1] if graph.digits else 0
        self.digits = graph.digits if width else None
        self.axes = max(width, 1)

    def _order(self) -> list[int]:
        """By descending weight: how much the variable's unary table and those of its edges spread."""
        spread = shared_map(lambda table: table.max(keepdims=True) - table.min(keepdims=True))
        weight = [float(spread(table).max()) for table in self.soft.unary]
        for edge, table in self.soft.edges.items():
            for v in edge:
                weight[v] += float(spread(table).max())
        return sorted(range(len(weight)), key=lambda v: (-weight[v], v))

    def run(self, price: float, limit: float | None) -> list[int]:
        """One pass over the axes at this price of a byte, then the sweeps."""
        costs = list(self.soft.unary)
        if self.graph.memory is not None and price > 0.0:
            costs = [cost + price * memory for cost, memory in zip(costs, self.graph.memory, strict=True)]
        choices = [0] * len(costs)
        for axis in range(self.axes):
            candidates = self._candidates(choices, axis)
            decided: set[int] = set()
            for v in self.order:
                choices[v] = self._choose(v, costs[v], candidates, choices, decided)
                decided.add(v)
        choices = descend(self.soft, choices, price=price)
        if limit is not None and self.graph.memory_of(choices) <= limit:
            choices = descend(self.soft, choices, limit=limit)
        return choices

    def _candidates(self, choices: list[int], axis: int) -> list[Indices]:
        """The choices of each variable that keep its digits before `axis` and split least after it."""
        if self.digits is None:
            return [np.arange(size) for size in self.graph.sizes]
        known: dict[tuple[int, int], Indices] = {}
        found = []
        for v, digits in enumerate(self.digits):
            key = (id(digits), choices[v])
            if key not in known:
                agree = (digits[:, :axis] == digits[choices[v], :axis]).all(axis=1)
                later = np.where(agree, (digits[:, axis + 1 :] != 0).sum(axis=1), digits.shape[1] + 1)
                known[key] = np.flatnonzero(later == later.min())
            found.append(known[key])
        return found

    def _choose(self, v: int, costs: Table, candidates: list[Indices], choices: list[int], decided: set[int]) -> int:
        mine = candidates[v]
        local = costs[mine]
        for u, table in self.around[v]:
            local += table[mine, choices[u]] if u in decided else table[np.ix_(mine, candidates[u])].min(axis=1)
        return int(mine[local.argmin()])
