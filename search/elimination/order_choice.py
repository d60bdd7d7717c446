"""The schedule of a graph: an elimination order with little work, and the joins in that order.

An order is found for the structure of a graph, its variables and edges. So a search follows the
order of one graph on all others of the same structure, which takes less time than to find another.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np

from autopar.compiled.elimination import Labels

from ..costgraph import CostGraph, Edge
from ..tables import Indices
from .folding import folding
from .orders import Order, Structure, order
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


def forget_orders() -> None:
    """Empty the cache of elimination orders, so that the next search starts cold."""
    order.cache_clear()
    _places.cache_clear()
    _followed.cache_clear()
    folding.cache_clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Places:
    """Where a graph has equal tables.

    `leaves`: the distinct pairs of a table and its memory, by their numbers (-1: without memory).
    `leaf_of`: the leaf of each variable, then of each edge. `cost_of`: the same for tables alone,
    as memory makes two leaves of one. Edges are in ascending order, `ends` are theirs.
    """

    leaves: tuple[tuple[int, int], ...]
    leaf_of: bytes
    cost_of: bytes
    ends: bytes


# Graphs of a mesh mostly have equal tables in the same places, whatever these hold.
@functools.lru_cache(maxsize=FOLLOWED)
def _places(
    unary: tuple[int, ...],
    memory: tuple[int, ...] | None,
    edges: tuple[Edge, ...],
    edge_numbers: tuple[int, ...],
) -> _Places:
    order_of = sorted(range(len(edges)), key=edges.__getitem__)
    pairs = [
        *zip(unary, memory or [-1] * len(unary), strict=True),
        *((edge_numbers[number], -1) for number in order_of),
    ]
    leaves: dict[tuple[int, int], int] = {}
    leaf_of = [leaves.setdefault(pair, len(leaves)) for pair in pairs]
    # Counted anew, as numbers of memory tables would make two orders of one structure.
    counted: dict[int, int] = {}
    cost_of = [counted.setdefault(cost, len(counted)) for cost, _ in pairs]
    ends = [edges[number] for number in order_of]
    return _Places(
        leaves=tuple(leaves),
        leaf_of=np.array(leaf_of, dtype=np.int64).tobytes(),
        cost_of=np.array(cost_of, dtype=np.int64).tobytes(),
        ends=np.array(ends, dtype=np.int64).tobytes(),
    )


class _Leaves:
    """The graph's distinct tables, with their memory."""

    def __init__(self, graph: CostGraph) -> None:
        self.graph = graph
        numbers = graph.numbers
        self.places = _places(numbers.unary, numbers.memory, tuple(graph.edges), numbers.edges)

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
        return kind, len(self.graph.sizes), self.places.ends

    def structure(self, sizes: tuple[int, ...] = ()) -> Structure:
        """Return the graph without its costs.

        Memory is ignored, so that one order serves with and without a limit.
        """
        return Structure(
            count=len(self.graph.sizes),
            ends=self.places.ends,
            tables=self.places.cost_of,
            sizes=sizes,
        )

    def follow(self, plan: Order) -> Schedule:
        """Return the joins of these tables in the rounds of `plan`.

        There are none if `plan` found the graph too wide.
        """
        if plan.too_wide:
            return Schedule(too_wide=plan.too_wide)
        sizes = np.array(self.graph.sizes, dtype=np.int64).tobytes()
        distinct = self.graph.numbers.distinct
        leaves = self.places.leaves
        return Schedule(
            costs=tuple([distinct[cost] for cost, _ in leaves]),
            memories=tuple([None if held < 0 else distinct[held] for _, held in leaves]),
            of=_followed(plan, len(leaves), sizes, self.places.leaf_of),
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
