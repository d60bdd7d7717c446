"""The schedule of a graph: an elimination order with little work, and the joins in that order.

An order is found for the structure of a graph, its variables and edges. So a search follows the
order of one graph on all others of the same structure, which takes less time than to find another.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

import numpy as np

from ..costgraph import CostGraph
from ..tables import Indices, Table
from .join import Labels
from .orders import Order, Structure, order
from .pruning import folding
from .schedules import Join, Joins, Schedule
from .shared_orders import share, shared_by

MAX_ENTRIES = 1 << 24
"""Entries of the largest table by default: 128 MiB."""
SECOND_ORDER_WORK = 1e8
"""Work (additions) above which an order that knows the sizes is tried, too.

The sizes are rounded up to powers of two, so that meshes share the order.
"""
SIZED = 3
"""How many of the orders that were found for other sizes are tried, the last ones first, before one
for the sizes at hand is.
"""
FOLLOWED = 64
"""Joins that are remembered: those of the last meshes, each with and without memory."""
T = TypeVar("T")


def schedule(graph: CostGraph, *, max_entries: int = MAX_ENTRIES) -> Schedule:
    """Return a schedule with little work.

    Its `too_wide` are the variables to fix first, so that no table exceeds `max_entries`.
    """
    # The order that ignores sizes is mostly known from another mesh of the model, so it costs
    # nothing. Only where it is long to follow does the search for a better one pay.
    leaves = _Leaves(graph)
    plan = leaves.follow(leaves.typical())
    fits = plan.widest <= max_entries
    if fits and plan.work < SECOND_ORDER_WORK:
        return plan
    if fits:
        rounded = tuple(1 << (size - 1).bit_length() for size in graph.sizes)
        second = leaves.follow(leaves.shared("rounded", lambda: order(leaves.structure(rounded))))
        return min((plan, second), key=lambda p: (p.widest > max_entries, p.work))

    # Neither greedy choice is the better one on all graphs.
    def sized() -> Order:
        structure = leaves.structure(graph.sizes)
        orders = (
            order(structure, max_entries=max_entries, by_fill=by_fill) for by_fill in (False, True)
        )
        return min(orders, key=lambda o: (len(o.too_wide), o.work))

    kind = "sized", max_entries, round(math.log2(sum(graph.sizes)))
    known = leaves.shared(kind, tuple[Order, ...])
    for one in reversed(known):
        plan = leaves.follow(one)
        if plan.too_wide or plan.widest <= max_entries:
            return plan
    another = sized()
    share(leaves.key(kind), (*known, another)[-SIZED:])
    return leaves.follow(another)


def typical_schedule(graph: CostGraph) -> Schedule:
    """The schedule in the order that ignores sizes."""
    leaves = _Leaves(graph)
    return leaves.follow(leaves.typical())


def typical_order(graph: CostGraph) -> Order:
    """The order that ignores sizes; it fits every graph with the same variables and edges."""
    return _Leaves(graph).typical()


def forget_orders() -> None:
    """Empty the cache of elimination orders, so that the next search starts cold."""
    order.cache_clear()
    _followed.cache_clear()
    folding.cache_clear()


def follow(graph: CostGraph, plan: Order) -> Schedule:
    """The schedule of `graph` in the order of a graph with the same variables and edges."""
    return _Leaves(graph).follow(plan)


class _Leaves:
    """The graph's distinct tables, with their memory.

    `table`: the number of each variable's table, then of each edge's.
    """

    def __init__(self, graph: CostGraph) -> None:
        self.graph = graph
        self.edges = sorted(graph.edges)
        self.costs: list[Table] = []
        self.memories: list[Table | None] = []
        interner = graph.interner
        numbers: dict[tuple[int, int], int] = {}
        memories: Sequence[Table | None] = graph.memory or [None] * len(graph.sizes)
        self.table = []
        self.cost_numbers: list[int] = []
        for cost, memory in [
            *zip(graph.unary, memories, strict=True),
            *((graph.edges[edge], None) for edge in self.edges),
        ]:
            pair = interner.number(cost), -1 if memory is None else interner.number(memory)
            leaf = numbers.setdefault(pair, len(numbers))
            if leaf == len(self.costs):
                self.costs.append(cost)
                self.memories.append(memory)
                self.cost_numbers.append(pair[0])
            self.table.append(leaf)

    def typical(self) -> Order:
        """The order that ignores sizes."""
        return self.shared("typical", lambda: order(self.structure()))

    def shared(self, kind: object, make: Callable[[], T]) -> T:
        """Return an order of this kind for these variables and edges.

        It is made by `make`, or known from another graph where orders are shared.
        """
        return shared_by(self.key(kind), make)

    def key(self, kind: object) -> object:
        """Return the key of a kind of order for these variables and edges."""
        return kind, len(self.graph.sizes), np.array(self.edges, dtype=np.int64).tobytes()

    def structure(self, sizes: tuple[int, ...] = ()) -> Structure:
        """Return the graph without its costs.

        Memory is ignored, so that one order serves with and without a limit.
        """
        # Counted anew, as numbers of memory tables would make two orders of one structure.
        counted: dict[int, int] = {}
        costs = [counted.setdefault(number, len(counted)) for number in self.cost_numbers]
        tables = np.array([costs[leaf] for leaf in self.table], dtype=np.int64)
        ends = np.array(self.edges, dtype=np.int64)
        return Structure(
            count=len(self.graph.sizes), ends=ends.tobytes(), tables=tables.tobytes(), sizes=sizes
        )

    def follow(self, plan: Order) -> Schedule:
        """Return the joins of these tables in the rounds of `plan`.

        There are none if `plan` found the graph too wide.
        """
        if plan.too_wide:
            return Schedule(too_wide=plan.too_wide)
        sizes = np.array(self.graph.sizes, dtype=np.int64)
        tables = np.array(self.table, dtype=np.int64)
        return Schedule(
            costs=tuple(self.costs),
            memories=tuple(self.memories),
            of=_followed(plan, len(self.costs), sizes.tobytes(), tables.tobytes()),
        )


# Graphs of a mesh mostly differ in what their tables hold alone.
@functools.lru_cache(maxsize=FOLLOWED)
def _followed(plan: Order, leaves: int, size_of: bytes, table_of: bytes) -> Joins:
    """Return the joins of a plan over so many leaves.

    `size_of`: the choices of each variable. `table_of`: the leaf of each variable, then of each
    edge. Both are arrays of int64.
    """
    sizes = np.frombuffer(size_of, dtype=np.int64)
    numbers = np.full(plan.factors, -1)
    numbers[: len(table_of) // sizes.itemsize] = np.frombuffer(table_of, dtype=np.int64)
    known: dict[tuple[object, ...], int] = {}
    joins: list[Join] = []
    rounds = []
    for step in plan.rounds:
        rows = _sorted_blocks(numbers[step.inputs], step.labels)
        members = []
        for member, row in enumerate(rows.tolist()):
            join = known.setdefault((step.labels, *row), len(joins))
            if join == len(joins):
                shape = tuple(sizes[step.neighbours[member]].tolist())
                inputs = tuple(zip(step.labels, row, strict=True))
                joins.append(
                    Join(inputs=inputs, size=int(sizes[step.variables[member]]), shape=shape)
                )
            members.append(join)
        numbers[step.outputs] = leaves + np.array(members)
        rounds.append((step, tuple(members)))
    return Joins(leaves=leaves, joins=tuple(joins), rounds=tuple(rounds))


def _sorted_blocks(rows: Indices, labels: tuple[Labels, ...]) -> Indices:
    """Return the rows with tables of equal labels in ascending order.

    Equal joins then have equal rows.
    """
    start = 0
    for _, group in groupby(labels):
        stop = start + len(list(group))
        if stop > start + 1:
            rows[:, start:stop].sort(axis=1)
        start = stop
    return rows
