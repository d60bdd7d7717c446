"""Minimisation of cost + price * memory by elimination; variables that make tables too wide are split and fixed.

The variables in the schedule's `too_wide` are treated twice.
- For the bound, each is split into one copy for each of its edges, with equal shares of its unary table. The copies may
  disagree: a relaxation, so its optimum is at most the true one.
- For the assignment, each is fixed to a choice and the rest is eliminated exactly; then coordinate descent moves all
  variables. Both repeat until nothing improves.

    sum_v unary_v + sum_uv edge_uv  >=  min over copies of  sum_v sum_{u ~ v} (unary_v[x_vu] / degree_v + ...)
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from .costgraph import CostGraph, Edge, Indices, NoAssignment, Table, shared_map
from .elimination import MAX_ENTRIES, Schedule, last_of, schedule, typical_schedule
from .local_search import descend
from .pruning import Reduction, reduce

ROUNDS = 4
"""The largest number of rounds of elimination and descent in an improvement."""
CASES = 4
"""Cases of choices of the split variables, the last ones, whose solvers are kept."""
PRUNE_WORK = 6e8
"""Additions of an elimination above which choices are pruned first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minimum:
    """Choices, a certified lower bound of cost + price * memory, and the tables of the elimination."""

    choices: list[int]
    bound: float
    tables: list[Table]


class Minimiser:
    """Solves one graph at any price of a byte; the order of elimination is planned once.

    `fixed`: the split variables. `relaxed`: the graph with one copy of each of them for each edge. `origins`: for each
    variable of `relaxed`, the number of the variable in the graph.
    """

    def __init__(self, graph: CostGraph, *, max_entries: int = MAX_ENTRIES, plan: Schedule | None = None) -> None:
        self.graph = graph
        self.max_entries = max(max_entries, *graph.sizes, 1)
        self.plan = plan or schedule(graph, max_entries=self.max_entries)
        self.fixed: tuple[int, ...] = ()
        self.relaxed, self.origins = graph, list(range(len(graph.sizes)))
        self._improving: _Improving | None = None
        self._free: Minimum | None = None
        # The order after a split may differ and find further variables that are too wide.
        while self.plan.too_wide:
            self.fixed += self.plan.too_wide
            self.relaxed, self.origins = _split(graph, self.fixed)
            self.plan = schedule(self.relaxed, max_entries=self.max_entries)

    @property
    def exact(self) -> bool:
        """Whether the bound is the optimum (up to rounding)."""
        return not self.fixed

    def minimise(self, price: float = 0.0, known: Minimum | None = None, *, improve: bool = True, close: float = 0.0) -> Minimum:
        """The minimum of cost + `price` * memory; of a relaxation if variables are split.

        `known`: a minimum at another price; its tables without memory are used again. `improve`: improve a relaxation's
        assignment until it is as `close` to the bound; False if only the bound is needed.
        """
        tables = self.plan.evaluate(price, known.tables if known is not None else ())
        bound = self.plan.optimum(tables)
        if bound == math.inf:
            raise NoAssignment
        choices = self.plan.assignment(tables)[: len(self.graph.sizes)]
        if self.exact:
            return Minimum(choices=choices, bound=bound, tables=tables)
        bound -= 1e-12 * abs(bound)  # a margin for the rounding of the shared unary tables
        best = self.improve(choices, price, enough=bound + close * abs(bound)) if improve else choices
        return Minimum(choices=best, bound=bound, tables=tables)

    def free(self, *, close: float = 0.0) -> Minimum:
        """The minimum without a price, found once."""
        self._free = self._free or self.minimise(close=close)
        return self._free

    def without(self, kept: Sequence[Indices]) -> "Minimiser":
        """The solver of the graph with only the kept choices, with the same variables split."""
        other = copy(self)
        other._improving, other._free = None, None
        other.graph = restrict(self.graph, kept)
        other.relaxed = restrict(self.relaxed, [kept[origin] for origin in self.origins])
        other.plan = schedule(other.relaxed, max_entries=self.max_entries)
        return other

    def merge(self) -> None:
        """Join the copies of each split variable again, unless that makes a table too wide."""
        self._free = None
        for v in self.fixed:
            relaxed, origins = self._merged(v)
            plan = schedule(relaxed, max_entries=self.max_entries)
            if not plan.too_wide:
                self.relaxed, self.origins, self.plan = relaxed, origins, plan
                self.fixed = tuple(u for u in self.fixed if u != v)

    def _merged(self, v: int) -> tuple[CostGraph, list[int]]:
        """The relaxed graph with a single `v`, and its origins."""
        left = [i for i, origin in enumerate(self.origins) if origin != v or i == v]
        number = {i: n for n, i in enumerate(left)} | {i: v for i, origin in enumerate(self.origins) if origin == v}
        turned = shared_map(lambda table: np.ascontiguousarray(table.T))
        edges: dict[Edge, Table] = {}
        for (a, b), table in self.relaxed.edges.items():
            ends = number[a], number[b]
            edges[min(ends), max(ends)] = table if ends[0] < ends[1] else turned(table)

        def rows(tables: Sequence[Table], own: Table) -> tuple[Table, ...]:
            return tuple(own if i == v else tables[i] for i in left)

        memory = rows(self.relaxed.memory, self.graph.memory[v]) if self.relaxed.memory and self.graph.memory else None
        sizes = tuple(self.relaxed.sizes[i] for i in left)
        merged = CostGraph(sizes=sizes, unary=rows(self.relaxed.unary, self.graph.unary[v]), edges=edges, memory=memory)
        return merged, [self.origins[i] for i in left]

    def tighten(self, marginals: Sequence[Table], step: float) -> None:
        """Shift cost between the copies of each split variable, towards equal marginals (filtering.py).

        The unary tables of the copies keep their sum, so the optimum stays a lower bound.
        """
        unary, self._free = list(self.relaxed.unary), None
        for v in self.fixed:
            copies = [i for i, origin in enumerate(self.origins) if origin == v]
            finite = np.isfinite(marginals[v])
            mean = sum(marginals[i] for i in copies) / len(copies)
            for i in copies:
                with np.errstate(invalid="ignore"):
                    unary[i] = np.where(finite & np.isfinite(mean), unary[i] - step * (marginals[i] - mean), unary[i])
        self.relaxed = replace(self.relaxed, unary=tuple(unary))
        self.plan = schedule(self.relaxed, max_entries=self.max_entries)

    def improve(self, choices: list[int], price: float = 0.0, *, enough: float = -math.inf) -> list[int]:
        """A better assignment than that of a relaxation; of those at most `enough` the first."""
        # The copies of a split variable may disagree, so the start may meet a forbidden entry: descend on soft tables.
        improving = self._improving = self._improving or _Improving(self.graph, self.max_entries)
        soft = improving.soft

        def value(candidate: Sequence[int]) -> float:
            return soft.cost(candidate) + price * soft.memory_of(candidate)

        best = descend(soft, choices, price=price)
        before: dict[int, int] = {}
        for _ in range(ROUNDS):
            settled = {v: best[v] for v in self.fixed}
            if settled == before or value(best) <= enough:
                break  # the rest would be the same again
            rest, before = improving.rest(settled, price), settled
            merged = [best[v] if v in self.fixed else choice for v, choice in enumerate(rest)]
            merged = descend(soft, merged, price=price)
            if value(merged) >= value(best):
                break
            best = merged
        return best


class _Improving:
    """What improvements of assignments of a graph have in common at all prices: its soft tables, and the solvers of the last cases."""

    def __init__(self, graph: CostGraph, max_entries: int) -> None:
        self.soft, self.max_entries = soften(graph), max_entries
        self.known: dict[tuple[tuple[int, int], ...], tuple[Minimiser, Minimum | None]] = {}

    def rest(self, settled: Mapping[int, int], price: float) -> list[int]:
        """The best assignment with these choices of the split variables."""
        key = tuple(settled.items())
        solver, last = self.known.pop(key, (None, None))
        if solver is None:
            solver = Minimiser(reduce(condition(self.soft, settled), prune=False).graph, max_entries=self.max_entries)
        found = solver.minimise(price, last)
        self.known[key] = solver, found
        if len(self.known) > CASES:
            del self.known[next(iter(self.known))]
        return found.choices


def shrink(
    graph: CostGraph, *, max_entries: int = MAX_ENTRIES, memory: bool = True, prune: bool = True
) -> tuple[Reduction, Schedule | None]:
    """A smaller graph with its schedule, or (if elimination is more work than pruning) a graph with None, pruned if it is to be."""
    small = reduce(graph, prune=False, memory=memory)
    plan = typical_schedule(small.graph)
    if plan.work <= PRUNE_WORK and plan.widest <= max_entries:
        return small, plan
    return reduce(graph, memory=memory) if prune else small, None


def prepare(graph: CostGraph, *, max_entries: int = MAX_ENTRIES, memory: bool = True) -> tuple[Reduction, Minimiser]:
    """A smaller graph, with its solver."""
    small, plan = shrink(graph, max_entries=max_entries, memory=memory)
    return small, Minimiser(small.graph, max_entries=max_entries, plan=plan)


def prepared(graph: CostGraph, *, max_entries: int = MAX_ENTRIES) -> tuple[Reduction, Minimiser]:
    """The same; where graphs share orders, that of the last graph is known."""
    return last_of(("prepared", max_entries), graph, lambda _: prepare(graph, max_entries=max_entries))


def soften(graph: CostGraph) -> CostGraph:
    """The graph with a finite penalty instead of infinity, so that descent can leave forbidden assignments.

    The penalty is above any finite cost.
    """
    tables = [*graph.unary, *graph.edges.values()]
    spread = shared_map(lambda table: np.abs(table[np.isfinite(table)]).max(initial=0.0, keepdims=True))
    penalty = 1.0 + 2.0 * math.fsum(float(spread(table).max()) for table in tables)
    fill = shared_map(lambda table: np.where(np.isinf(table), penalty, table) if np.isinf(table).any() else table)
    return replace(graph, unary=tuple(fill(t) for t in graph.unary), edges={edge: fill(t) for edge, t in graph.edges.items()})


def condition(graph: CostGraph, settled: Mapping[int, int]) -> CostGraph:
    """The graph in which each variable of `settled` has this single choice."""
    picks = {v: slice(choice, choice + 1) for v, choice in settled.items()}
    whole = slice(None)

    def rows(tables: Sequence[Table]) -> tuple[Table, ...]:
        return tuple(table[picks[v]] if v in picks else table for v, table in enumerate(tables))

    edges = {
        (u, v): table[picks.get(u, whole), picks.get(v, whole)] if u in picks or v in picks else table
        for (u, v), table in graph.edges.items()
    }
    sizes = tuple(1 if v in picks else size for v, size in enumerate(graph.sizes))
    return CostGraph(sizes=sizes, unary=rows(graph.unary), edges=edges, memory=None if graph.memory is None else rows(graph.memory))


def restrict(graph: CostGraph, kept: Sequence[Indices]) -> CostGraph:
    """The graph with only the kept choices of each variable; equal cuts of a shared table stay shared."""
    made: dict[object, Table] = {}
    numbers: dict[tuple[int, bytes], int] = {}
    names = [numbers.setdefault((size, keep.tobytes()), v) for v, (size, keep) in enumerate(zip(graph.sizes, kept, strict=True))]

    def row(table: Table, v: int) -> Table:
        return made.setdefault((id(table), names[v]), table[kept[v]])

    def cut(table: Table, u: int, v: int) -> Table:
        key = (id(table), names[u], names[v])
        if key not in made:
            made[key] = table[np.ix_(kept[u], kept[v])]
        return made[key]

    return CostGraph(
        sizes=tuple(len(keep) for keep in kept),
        unary=tuple(row(table, v) for v, table in enumerate(graph.unary)),
        edges={(u, v): cut(table, u, v) for (u, v), table in graph.edges.items()},
        memory=None if graph.memory is None else tuple(row(table, v) for v, table in enumerate(graph.memory)),
    )


def _share(table: Table, parts: int) -> Table:
    return table / parts


def _split(graph: CostGraph, fixed: Sequence[int]) -> tuple[CostGraph, list[int]]:
    """The relaxed graph and its origins; a variable's first copy keeps its number, further copies come last."""
    degree = dict.fromkeys(fixed, 0)
    for edge in graph.edges:
        for v in edge:
            if v in degree:
                degree[v] += 1
    shares = {k: shared_map(partial(_share, parts=max(k, 1))) for k in set(degree.values())}
    transposed = shared_map(lambda table: np.ascontiguousarray(table.T))
    sizes, origins = list(graph.sizes), list(range(len(graph.sizes)))
    used: set[int] = set()
    edges: dict[Edge, Table] = {}
    for edge in sorted(graph.edges):
        ends = []
        for v in edge:
            if v in used:
                ends.append(len(sizes))
                sizes.append(graph.sizes[v])
                origins.append(v)
            else:
                ends.append(v)
                used.update({v} & degree.keys())
        table = graph.edges[edge]
        edges[min(ends), max(ends)] = table if ends[0] < ends[1] else transposed(table)

    def rows(tables: Sequence[Table]) -> tuple[Table, ...]:
        return tuple(shares[degree[v]](tables[v]) if v in degree else tables[v] for v in origins)

    memory = None if graph.memory is None else rows(graph.memory)
    return CostGraph(sizes=tuple(sizes), unary=rows(graph.unary), edges=edges, memory=memory), origins
