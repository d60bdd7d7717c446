"""The near-linear search: elimination on one mesh axis at a time, then sweeps and descent.

After the double recursion of H. Wang et al., Efficient and Systematic Partitioning of Large and
Deep Neural Networks for Parallelization (Euro-Par 2021), whose inner recursion is greedy. For each
axis a in turn:

    x  <-  argmin of the cost over
           { y : digit_b(y_v) = digit_b(x_v) for the axes b before a, no split after a }

A variable's candidates agree with its choice on the axes before a, and split least on the axes
after a. They are a handful, so elimination takes time linear in the variables. A sweep chooses
again on one axis with all others fixed: a larger neighbourhood than a single variable's. The time
is linear in the axes, because the joint choices over all axes, exponential in their number, are
never enumerated.
"""

import math

import numpy as np

from ..costgraph import CostGraph, Infeasible, Proof, Solution, memory_tables, solution
from ..elimination.conditioning import Minimiser
from ..elimination.derived_graphs import restrict, soften
from ..elimination.local_search import descend
from ..elimination.order_choice import follow, typical_order
from ..memory.lagrangian import least_memory
from ..tables import Indices, Interner, shared_map

METHOD = "recursive_programming"
BISECTIONS = 8
"""Steps of bisection between a price that is too low and one that fits."""
DOUBLINGS = 60
"""The most doublings of the price of a byte until an assignment fits."""
SWEEPS = 3
"""The largest number of sweeps."""
CLOSE = 1e-4
"""The sweeps end if the last one saved less than this share of the cost."""
WIDTH = 1 << 16
"""Entries of the widest table."""


def recursive_programming(graph: CostGraph, *, memory_limit: float | None = None) -> Solution:
    """Return a good solution in little time, with a cheap lower bound.

    The bound is the sum of the least entries of all tables.
    """
    search = _Recursion(graph)
    bound = math.fsum(
        float(search.least(table).min()) for table in (*graph.unary, *graph.edges.values())
    )
    if memory_limit is None:
        choices = search.run(0.0, None)
    else:
        memory_tables(graph)
        choices = _within(search, memory_limit)
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


def _within(search: "_Recursion", limit: float) -> list[int]:
    """Return the cheapest assignment that fits, by bisection on the price of a byte.

    The price doubles until an assignment fits, and is then bisected.
    """
    graph = search.graph
    choices = search.run(0.0, limit)
    if graph.memory_of(choices) <= limit:
        return choices
    low = 0.0
    # At this price all bytes cost as much as all seconds, which is the scale of a price that
    # matters.
    high = max(abs(search.soft.cost(choices)), 1e-300) / graph.memory_of(choices)
    fitting: list[list[int]] = []
    for _ in range(DOUBLINGS):
        choices = search.run(high, limit, choices)
        if graph.memory_of(choices) <= limit:
            fitting.append(choices)
            break
        low = high
        high = 2.0 * high
    for _ in range(BISECTIONS if fitting else 0):
        middle = 0.5 * (low + high)
        tried = search.run(middle, limit, choices)
        if graph.memory_of(tried) <= limit:
            fitting.append(tried)
            high = middle
        else:
            low = middle
    # A dearer byte does not always cost more: the search is not exact, so all that fit are
    # compared.
    return min(fitting, key=graph.cost, default=choices)


class _Recursion:
    """The parts of the search that are the same at every price, such as the elimination order."""

    def __init__(self, graph: CostGraph) -> None:
        self.graph = graph
        # A handful of candidates may have no allowed combination, which the next axis may mend.
        self.soft = soften(graph)
        self.least = shared_map(lambda table: table.min(keepdims=True))
        width = graph.digits[0].shape[1] if graph.digits else 0
        self.digits = graph.digits if width else None
        interner = Interner()
        self.digit_numbers = [interner.number(table) for table in self.digits or ()]
        self.axes = range(max(width, 1))
        # Candidates differ from run to run in their number, the edges do not: one order serves all.
        self.order = typical_order(self.soft)

    def run(self, price: float, limit: float | None, start: list[int] | None = None) -> list[int]:
        """Return the best assignment at this price of a byte.

        It goes over the axes in both orders (or begins at `start`), then sweeps.
        """
        starts = (
            [start]
            if start is not None
            else [self._axis_by_axis(price, axes) for axes in self._orders()]
        )
        choices = min(
            (self._sweep(price, start) for start in starts),
            key=lambda swept: self._value(swept, price),
        )
        if limit is not None and self.graph.memory_of(choices) <= limit:
            choices = descend(self.soft, choices, limit=limit)
        return choices

    def _value(self, choices: list[int], price: float) -> float:
        return self.soft.cost(choices) + price * self.soft.memory_of(choices)

    def _orders(self) -> list[list[int]]:
        return [list(self.axes), list(reversed(self.axes))][: len(self.axes)]

    def _axis_by_axis(self, price: float, axes: list[int]) -> list[int]:
        # Before the first axis nothing is decided, so the choices to start from have no effect.
        choices = [0] * len(self.graph.sizes)
        for place, axis in enumerate(axes):
            choices = self._best(self._candidates(choices, axis, axes[:place]), price)
        return choices

    def _sweep(self, price: float, choices: list[int]) -> list[int]:
        """Choose again on each axis with the others fixed, and descend, until nothing improves."""
        value = self._value(choices, price)
        for _ in range(SWEEPS):
            for axis in self.axes if len(self.axes) > 1 else ():
                choices = self._best(
                    self._candidates(
                        choices, axis, [other for other in self.axes if other != axis]
                    ),
                    price,
                )
            choices = descend(self.soft, choices, price=price)
            before = value
            value = self._value(choices, price)
            if not value < before - CLOSE * abs(before):
                break
        return choices

    def _candidates(self, choices: list[int], axis: int, decided: list[int]) -> list[Indices]:
        """Return the candidates of each variable.

        They have equal digits on the `decided` axes, and the fewest splits on the axes to come.
        """
        if self.digits is None:
            return [np.arange(size) for size in self.graph.sizes]
        later = [other for other in self.axes if other != axis and other not in decided]
        known: dict[tuple[int, int], Indices] = {}
        candidates = []
        for number, digits, choice in zip(self.digit_numbers, self.digits, choices, strict=True):
            key = (number, choice)
            if key not in known:
                agree = (digits[:, decided] == digits[choice, decided]).all(axis=1)
                # Choices that do not agree count as one split more than there are axes.
                splits = np.where(agree, (digits[:, later] != 0).sum(axis=1), digits.shape[1] + 1)
                known[key] = np.flatnonzero(splits == splits.min())
            candidates.append(known[key])
        return candidates

    def _best(self, candidates: list[Indices], price: float) -> list[int]:
        """The best assignment of these candidates; exact unless the tables are too wide."""
        small = restrict(self.soft, candidates)
        plan = follow(small, self.order)
        if plan.widest > WIDTH:
            chosen = Minimiser(small, max_entries=WIDTH).minimise(price).choices
        else:
            chosen = plan.assignment(plan.evaluate(price))
        return [int(indices[choice]) for indices, choice in zip(candidates, chosen, strict=True)]
