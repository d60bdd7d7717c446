"""Variable elimination: the joins of a graph's tables, each distinct join computed once.

    m_v[x_N(v)] = min over x_v of  sum of the tables that contain v
    x_v         = the choice that attains m_v[x_N(v)]

To eliminate v, sum the tables that contain v and minimise over v; the result is one table over v's
neighbours. In reverse order each variable then takes its best choice given its neighbours. Source:
U. Bertele and F. Brioschi, Nonserial Dynamic Programming, 1972.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar, cast

import numpy as np

from ..costgraph import CostGraph
from ..tables import Indices, Table
from .minplus import Labels, eliminate
from .orders import Order, Round, Structure, order

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
_SHARED: ContextVar[dict[object, Any] | None] = ContextVar(
    "orders that the graphs of a search share", default=None
)
_LAST: ContextVar[dict[object, tuple[CostGraph, Any]] | None] = ContextVar(
    "what is known of the last graphs of a search", default=None
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The minimum over label 0 of the sum of `inputs` (labels of the axes, number of the table)."""

    inputs: tuple[tuple[Labels, int], ...]
    size: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An eliminated variable, the neighbours that it then had, and its join.

    The neighbours are in the order of the join's labels 1, 2, ...
    """

    variable: int
    neighbours: tuple[int, ...]
    join: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Joins over numbered tables: first the leaves, then one table for each join.

    A leaf has costs, and memories or None.
    """

    costs: tuple[Table, ...]
    memories: tuple[Table | None, ...]
    joins: tuple[Join, ...]
    rounds: tuple[tuple[Round, tuple[int, ...]], ...]
    too_wide: tuple[int, ...] = ()

    @property
    def work(self) -> float:
        """Additions of all distinct joins."""
        return sum(float(join.size) * math.prod(join.shape) for join in self.joins)

    @property
    def volume(self) -> float:
        """Entries of all cliques; equal joins count each time."""
        sizes = [float(join.size) * math.prod(join.shape) for join in self.joins]
        return math.fsum(sizes[join] for _, joins in self.rounds for join in joins)

    @property
    def widest(self) -> int:
        """Entries of the largest table that results from a join."""
        return max((math.prod(join.shape) for join in self.joins), default=1)

    @property
    def steps(self) -> list[Step]:
        """The rounds, variable by variable."""
        return [
            Step(variable=v, neighbours=tuple(around), join=join)
            for step, joins in self.rounds
            for v, around, join in zip(
                step.variables.tolist(), step.neighbours.tolist(), joins, strict=True
            )
        ]

    def evaluate(self, price: float = 0.0, known: Sequence[Table] = ()) -> list[Table]:
        """Return all tables at `price` per byte.

        `known`: the tables at another price; those without memory in them are used again.
        """
        leaves = list(zip(self.costs, self.memories, strict=True))
        tables = [cost if memory is None else cost + price * memory for cost, memory in leaves]
        priced = [memory is not None and bool(memory.any()) for _, memory in leaves]
        for number, join in enumerate(self.joins, len(tables)):
            # A join into which no memory has entered is the same at every price.
            priced.append(any(priced[table] for _, table in join.inputs))
            if known and not priced[number]:
                tables.append(known[number])
            else:
                tables.append(
                    eliminate(
                        [(labels, tables[table]) for labels, table in join.inputs], join.shape
                    )
                )
        return tables

    def optimum(self, tables: Sequence[Table]) -> float:
        """Return the least sum, of the constants after each connected component's last variable."""
        roots = [
            join for step, joins in self.rounds if not step.neighbours.shape[1] for join in joins
        ]
        return math.fsum(float(tables[len(self.costs) + join]) for join in roots)

    def assignment(self, tables: Sequence[Table]) -> list[int]:
        """The optimal choices, by back-substitution; equal cases are computed once."""
        choices = np.zeros(sum(len(joins) for _, joins in self.rounds), dtype=np.int64)
        known: dict[tuple[int, ...], int] = {}
        for step, joins in reversed(self.rounds):
            attained = []
            for join, chosen in zip(joins, choices[step.neighbours].tolist(), strict=True):
                case = (join, *chosen)
                if case not in known:
                    known[case] = int(conditional(self.joins[join], tables, chosen).argmin())
                attained.append(known[case])
            choices[step.variables] = attained
        return [int(choice) for choice in choices]


def conditional(join: Join, tables: Sequence[Table], chosen: Sequence[int]) -> Table:
    """The cost of each choice of the eliminated variable, given its neighbours' `chosen` ones."""
    total = np.zeros(join.size)
    for labels, table in join.inputs:
        total = (
            total
            + tables[table][
                tuple(slice(None) if label == 0 else chosen[label - 1] for label in labels)
            ]
        )
    return total


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

    known = leaves.shared(("sized", max_entries, round(math.log2(sum(graph.sizes)))), list[Order])
    for one in reversed(known[-SIZED:]):
        plan = leaves.follow(one)
        if plan.too_wide or plan.widest <= max_entries:
            return plan
    known.append(sized())
    return leaves.follow(known[-1])


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


@contextlib.contextmanager
def sharing_orders() -> Iterator[None]:
    """Let all graphs with the same variables and edges share one order, whatever their tables.

    It is the order of the first of them: to find an order mostly takes longer than to follow it.
    """
    tokens = _SHARED.set({}), _LAST.set({})
    try:
        yield
    finally:
        _SHARED.reset(tokens[0])
        _LAST.reset(tokens[1])


def last_of(kind: object, graph: CostGraph, make: Callable[[T | None], T]) -> T:
    """Return what `make` gives for a graph, remembered for the last graph of each kind.

    It is remembered where orders are shared, and handed to `make` for the next graph.
    """
    known = _LAST.get()
    if known is None:
        return make(None)
    last = known.get(kind)
    # The graph is kept beside the value, so that no later object can pass for it.
    if last is None or last[0] is not graph:
        last = known[kind] = graph, make(None if last is None else last[1])
    return cast(T, last[1])


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
        known = _SHARED.get()
        if known is None:
            return make()
        key = kind, len(self.graph.sizes), np.array(self.edges, dtype=np.int64).tobytes()
        if key not in known:
            known[key] = make()
        return cast(T, known[key])

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
            return Schedule(costs=(), memories=(), joins=(), rounds=(), too_wide=plan.too_wide)
        sizes = np.array(self.graph.sizes, dtype=np.int64)
        numbers = np.full(plan.factors, -1)
        numbers[: len(self.table)] = self.table
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
            numbers[step.outputs] = len(self.costs) + np.array(members)
            rounds.append((step, tuple(members)))
        return Schedule(
            costs=tuple(self.costs),
            memories=tuple(self.memories),
            joins=tuple(joins),
            rounds=tuple(rounds),
        )


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
