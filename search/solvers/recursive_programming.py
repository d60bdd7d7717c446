"""The near-linear search: one mesh axis after the other, with a few choices of each variable.

After the double recursion of H. Wang et al., Efficient and Systematic Partitioning of Large and
Deep Neural Networks for Parallelization (Euro-Par 2021), over axes and over operators:

1. Variables with equal surroundings are one (elimination/alike.py).
2. With each axis the choices of a variable are the few best so far, each with every digit on that
   axis (axis_by_axis.py). Messages tell what each costs with its surroundings
   (elimination/messages.py), and the best stay.
3. Among the few that are left at the end, elimination finds the best assignment
   (elimination/greedy.py).

So a variable never has more than some dozens of choices, and time is linear in the variables and in
the axes: the joint choices over all axes, exponential in their number, are never joined.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..costgraph import (
    CostGraph,
    Edge,
    Infeasible,
    NoAssignment,
    Proof,
    Solution,
    memory_tables,
    solution,
)
from ..elimination.alike import classes
from ..elimination.greedy import planned
from ..elimination.local_search import descend
from ..elimination.messages import totals
from ..memory.lagrangian import least_memory
from ..tables import Indices, Interner, Table
from .axis_by_axis import Prefixes

METHOD = "recursive_programming"
BISECTIONS = 8
"""Steps of bisection between a price that is too low and one that fits."""
DOUBLINGS = 60
"""The most doublings of the price of a byte until an assignment fits."""
TOGETHER = 2
"""Axes that are decided together at first: their choices are few enough."""
PREFIXES = 16
"""Choices of a variable that stay from axis to axis."""
LAST = (8, 4)
"""Choices of a variable for elimination: the most with which nothing has to be decided greedily."""
ROUNDS = 3
"""Rounds of messages on the last axis; before, one is enough."""
PENALTY = 1e6
"""The cost of what is forbidden, in lower bounds of the cost."""


def recursive_programming(graph: CostGraph, *, memory_limit: float | None = None) -> Solution:
    """Return a good solution in little time, with a cheap lower bound.

    The bound is the sum of the least entries of all tables.
    """
    if memory_limit is not None:
        memory_tables(graph)
    bound = _least(graph)
    if bound == math.inf:
        raise NoAssignment
    search = _Recursion(graph, bound)
    if search.most < LAST[0] or not search.plan.is_exact:
        # Classes of like variables are connected more widely than the variables are.
        search = _Recursion(graph, bound, merge=False)
    choices = _within(search, memory_limit)
    if graph.cost(choices) == math.inf and search.merge:
        # Some variables may not choose like their likes.
        choices = _within(_Recursion(graph, bound, merge=False), memory_limit)
    if graph.cost(choices) == math.inf or (
        memory_limit is not None and graph.memory_of(choices) > memory_limit
    ):
        # Nothing allowed was found: begin at the assignment of least memory, which is always
        # allowed if any is.
        rescue = least_memory(graph)
        if memory_limit is not None and graph.memory_of(rescue) > memory_limit:
            raise Infeasible(graph.memory_of(rescue), memory_limit)
        choices = descend(graph, rescue, limit=memory_limit)
    proof = Proof(kind="minima", limit=memory_limit)
    return solution(
        graph, choices, lower_bound=min(bound, graph.cost(choices)), method=METHOD, proof=proof
    )


def _least(graph: CostGraph) -> float:
    """The sum of the least entries of all tables."""
    tables = (*graph.unary, *graph.edges.values())
    distinct = {id(table): table for table in tables}
    least = {name: float(table.min()) for name, table in distinct.items()}
    return math.fsum(least[id(table)] for table in tables)


def _within(search: "_Recursion", limit: float | None) -> list[int]:
    """Return the cheapest assignment that fits, by bisection on the price of a byte.

    The price doubles until an assignment fits, and is then bisected.
    """
    graph = search.graph
    choices = search.run(0.0, limit)
    if limit is None or graph.memory_of(choices) <= limit:
        return choices
    low = 0.0
    # At this price all bytes cost as much as all seconds, which is the scale of a price that
    # matters.
    high = max(abs(search.bound), 1e-300) / graph.memory_of(choices)
    fitting: list[list[int]] = []
    for _ in range(DOUBLINGS):
        choices = search.run(high, limit)
        if graph.memory_of(choices) <= limit:
            fitting.append(choices)
            break
        low = high
        high = 2.0 * high
    for _ in range(BISECTIONS if fitting else 0):
        middle = 0.5 * (low + high)
        tried = search.run(middle, limit)
        if graph.memory_of(tried) <= limit:
            fitting.append(tried)
            high = middle
        else:
            low = middle
    # A dearer byte does not always cost more: the search is not exact, so all that fit are
    # compared.
    return min(fitting, key=graph.cost, default=choices)


class _Recursion:
    """The parts of the search that are the same at every price.

    `bound`: a lower bound of the cost. `merge`: whether like variables choose alike.
    """

    def __init__(self, graph: CostGraph, bound: float, *, merge: bool = True) -> None:
        self.graph = graph
        self.bound = bound
        self.merge = merge
        digits = graph.digits or ()
        width = digits[0].shape[1] if digits else 0
        interner = Interner()
        numbers = np.zeros(len(graph.sizes), dtype=np.int64)
        if width:
            numbers = np.array([interner.number(array) for array in digits], dtype=np.int64)
        self.classes = classes(graph, numbers.tolist(), merge=merge)
        self.members = self.classes.members.tolist()
        self.numbers = numbers[self.members].tolist()
        self.prefixes = (
            Prefixes([array.astype(np.int64) for array in interner.arrays]) if width else None
        )
        self.lengths = range(min(width, TOGETHER), width + 1)
        self.standing = {
            length: self.prefixes.standing(length) for length in self.lengths if self.prefixes
        }
        self.penalty = PENALTY * (abs(bound) or 1.0)
        pairs = {(link.first, link.second) for link in self.classes.links}
        edges = sorted(pair for pair in pairs if pair[0] != pair[1])
        # A decision taken greedily loses more than a candidate fewer.
        for self.most in LAST:
            sizes = [min(graph.sizes[v], self.most) for v in self.members]
            self.plan = planned(sizes, edges)
            if self.plan.is_exact:
                break

    def run(self, price: float, limit: float | None) -> list[int]:
        """Return the best assignment at this price of a byte."""
        candidates = self._first()
        for length in self.lengths:
            if length > self.lengths[0]:
                candidates = self._longer(candidates, length)
            last = length == self.lengths[-1]
            unary, edges = self._tables(candidates, price)
            costs = totals(unary, edges, ROUNDS if last else 1)
            # The last axis leaves its candidates whole: elimination chooses among their costs.
            if not last:
                candidates = _best(candidates, costs, PREFIXES)
        chosen = self._eliminated(candidates, unary, edges, costs)
        choices: list[int] = np.array(chosen)[self.classes.of].tolist()
        if limit is not None and self.graph.memory_of(choices) <= limit:
            choices = descend(self.graph, choices, limit=limit)
        return choices

    def _first(self) -> list[Indices]:
        """The candidates of the classes on the first axes, or all choices without axes."""
        if self.prefixes is None:
            return [np.arange(self.graph.sizes[v]) for v in self.members]
        standing = self.standing[self.lengths[0]]
        return [standing[number] for number in self.numbers]

    def _longer(self, candidates: Sequence[Indices], length: int) -> list[Indices]:
        """The candidates with every digit on one more axis."""
        prefixes = self.prefixes
        assert prefixes is not None
        standing = self.standing[length]
        return [
            prefixes.longer(number, choices, standing[number], length - 1)
            for number, choices in zip(self.numbers, candidates, strict=True)
        ]

    def _tables(
        self, candidates: Sequence[Indices], price: float
    ) -> tuple[list[Table], dict[Edge, Table]]:
        """The tables of the candidates, for all variables of the classes together.

        What is forbidden has a finite penalty, as a few candidates may have nothing allowed.
        """
        graph = self.graph
        counts = self.classes.counts.tolist()
        unary: list[Table] = []
        for v, count, rows in zip(self.members, counts, candidates, strict=True):
            own = np.minimum(graph.unary[v][rows], self.penalty)
            if price and graph.memory is not None:
                own = own + price * graph.memory[v][rows]
            unary.append(count * own)
        edges: dict[Edge, Table] = {}
        for link in self.classes.links:
            first = candidates[link.first]
            second = candidates[link.second]
            # Like variables choose alike: an edge between two costs what one choice does.
            if link.first == link.second:
                own = np.minimum(link.table[first, first], self.penalty)
                unary[link.first] = unary[link.first] + link.count * own
                continue
            # On few axes all choices are candidates, and tables are used as they are.
            table = link.table
            if table.shape != (len(first), len(second)):
                table = table.take(first, 0).take(second, 1)
            table = np.minimum(table, self.penalty, order="C")
            if link.count > 1:
                table *= link.count
            pair = link.first, link.second
            edges[pair] = edges[pair] + table if pair in edges else table
        return unary, edges

    def _eliminated(
        self,
        candidates: Sequence[Indices],
        unary: Sequence[Table],
        edges: dict[Edge, Table],
        costs: Sequence[Table],
    ) -> list[int]:
        """The best assignment of the few best candidates."""
        everything = [np.arange(len(rows)) for rows in candidates]
        few = _best(everything, costs, self.most)
        chosen = self.plan.assign(
            [table[rows] for table, rows in zip(unary, few, strict=True)],
            {(u, v): table.take(few[u], 0).take(few[v], 1) for (u, v), table in edges.items()},
        )
        return [
            int(rows[left[choice]])
            for rows, left, choice in zip(candidates, few, chosen, strict=True)
        ]


def _best(candidates: Sequence[Indices], costs: Sequence[Table], most: int) -> list[Indices]:
    """The candidates of least cost, in their order."""
    return [
        rows if len(rows) <= most else rows[np.sort(np.argsort(cost, kind="stable")[:most])]
        for rows, cost in zip(candidates, costs, strict=True)
    ]
