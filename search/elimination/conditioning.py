"""Minimisation of cost + price * memory by elimination, with too wide variables split and fixed.

    sum_v unary_v + sum_uv edge_uv
      >=  min over copies of  sum_v sum_{u ~ v} (unary_v[x_vu] / degree_v + ...)

The variables in the schedule's `too_wide` are treated twice.

- For the bound, each is split into one copy for each of its edges, with equal shares of its unary
  table. The copies may disagree: a relaxation, so its optimum is at most the true one.
- For the assignment, each is fixed to a choice and the rest is eliminated exactly; then coordinate
  descent moves all variables. Both repeat until nothing improves.

Splitting variables for a bound is the mini-bucket idea (R. Dechter and I. Rish, Mini-buckets, JACM
50, 2003); fixing them is conditioning on a cutset (R. Dechter, Artificial Intelligence 41, 1990).
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from ..costgraph import CostGraph, Edge, NoAssignment
from ..tables import Indices, Table, shared_map
from .derived_graphs import condition, restrict, soften, split
from .local_search import Descent
from .order_choice import MAX_ENTRIES, schedule, typical_schedule
from .pruning import Reduction, reduce
from .schedules import Schedule
from .shared_orders import last_of

ROUNDS = 4
"""The largest number of rounds of elimination and descent in an improvement."""
CASES = 4
"""Cases of choices of the split variables, the last ones, whose solvers are cached."""
PRUNE_WORK = 6e8
"""Additions of an elimination above which choices are pruned first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minimum:
    """Choices, a certified lower bound of cost + price * memory, and the elimination's tables."""

    choices: list[int]
    bound: float
    tables: list[Table]


class Minimiser:
    """Solves one graph at any price of a byte; the order of elimination is planned once.

    `fixed`: the split variables. `relaxed`: the graph with one copy of each of them for each edge.
    `origins`: for each variable of `relaxed`, the number of the variable in the graph.
    """

    def __init__(
        self, graph: CostGraph, *, max_entries: int = MAX_ENTRIES, plan: Schedule | None = None
    ) -> None:
        self.graph = graph
        self.max_entries = max(max_entries, *graph.sizes, 1)
        self.plan = plan or schedule(graph, max_entries=self.max_entries)
        self.fixed: tuple[int, ...] = ()
        self.relaxed = graph
        self.origins = list(range(len(graph.sizes)))
        # Both are made when they are first asked for: many solvers only bound, at one price.
        self._improving: _Improving | None = None
        self._free: Minimum | None = None
        # The order after a split may differ and find further variables that are too wide.
        while self.plan.too_wide:
            self.fixed += self.plan.too_wide
            self.relaxed, self.origins = split(graph, self.fixed)
            self.plan = schedule(self.relaxed, max_entries=self.max_entries)

    @property
    def exact(self) -> bool:
        """Whether the bound is the optimum (up to rounding)."""
        return not self.fixed

    def minimise(
        self,
        price: float = 0.0,
        known: Minimum | None = None,
        *,
        improve: bool = True,
        close: float = 0.0,
    ) -> Minimum:
        """The minimum of cost + `price` * memory; of a relaxation if variables are split.

        `known`: a minimum at another price; its tables without memory are used again. `improve`:
        improve a relaxation's assignment until it is as `close` to the bound; False if only the
        bound is needed.
        """
        tables = self.plan.evaluate(price, known.tables if known is not None else ())
        bound = self.plan.optimum(tables)
        if bound == math.inf:
            raise NoAssignment
        choices = self.plan.assignment(tables)[: len(self.graph.sizes)]
        if self.exact:
            return Minimum(choices=choices, bound=bound, tables=tables)
        bound -= 1e-12 * abs(bound)  # a margin for the rounding of the shared unary tables
        best = (
            self.improve(choices, price, enough=bound + close * abs(bound)) if improve else choices
        )
        return Minimum(choices=best, bound=bound, tables=tables)

    def free(self, *, close: float = 0.0) -> Minimum:
        """The minimum without a price, found once."""
        self._free = self._free or self.minimise(close=close)
        return self._free

    def without(self, remaining: Sequence[Indices]) -> "Minimiser":
        """The solver of the graph of only the remaining choices, with the same variables split."""
        other = copy(self)
        other._improving = None
        other._free = None
        other.graph = restrict(self.graph, remaining)
        other.relaxed = restrict(self.relaxed, [remaining[origin] for origin in self.origins])
        other.plan = schedule(other.relaxed, max_entries=self.max_entries)
        return other

    def merge(self) -> None:
        """Join the copies of each split variable again, unless that makes a table too wide."""
        # The copies' unary tables may have moved since (`tighten`); the joined variable has its own
        # table again, which is the copies' sum.
        self._free = None
        for v in self.fixed:
            relaxed, origins = self._merged(v)
            plan = schedule(relaxed, max_entries=self.max_entries)
            if not plan.too_wide:
                self.relaxed = relaxed
                self.origins = origins
                self.plan = plan
                self.fixed = tuple(u for u in self.fixed if u != v)

    def _merged(self, v: int) -> tuple[CostGraph, list[int]]:
        """The relaxed graph with a single `v`, and its origins."""
        left = [i for i, origin in enumerate(self.origins) if origin != v or i == v]
        number = {i: n for n, i in enumerate(left)} | {
            i: v for i, origin in enumerate(self.origins) if origin == v
        }
        turned = shared_map(lambda table: np.ascontiguousarray(table.T))
        edges: dict[Edge, Table] = {}
        for (a, b), table in self.relaxed.edges.items():
            ends = number[a], number[b]
            edges[min(ends), max(ends)] = table if ends[0] < ends[1] else turned(table)

        def rows(tables: Sequence[Table], own: Table) -> tuple[Table, ...]:
            return tuple(own if i == v else tables[i] for i in left)

        memory = (
            rows(self.relaxed.memory, self.graph.memory[v])
            if self.relaxed.memory and self.graph.memory
            else None
        )
        sizes = tuple(self.relaxed.sizes[i] for i in left)
        merged = CostGraph(
            derived=True,
            sizes=sizes,
            unary=rows(self.relaxed.unary, self.graph.unary[v]),
            edges=edges,
            memory=memory,
        )
        return merged, [self.origins[i] for i in left]

    def tighten(self, marginals: Sequence[Table], step: float) -> None:
        """Shift cost between the copies of each split variable, towards equal marginals.

        The unary tables of the copies keep their sum, so the optimum stays a lower bound
        (filtering.py).
        """
        unary = list(self.relaxed.unary)
        self._free = None
        # Copies of equal marginals have the same best choice, so they gain nothing by disagreeing.
        for v in self.fixed:
            copies = [i for i, origin in enumerate(self.origins) if origin == v]
            finite = np.isfinite(marginals[v])
            mean = sum(marginals[i] for i in copies) / len(copies)
            for i in copies:
                # A choice that is forbidden in one copy is so in all: nothing finite is moved to or
                # from it, as infinity minus infinity is no cost.
                with np.errstate(invalid="ignore"):
                    unary[i] = np.where(
                        finite & np.isfinite(mean),
                        unary[i] - step * (marginals[i] - mean),
                        unary[i],
                    )
        self.relaxed = replace(self.relaxed, derived=True, unary=tuple(unary))
        self.plan = schedule(self.relaxed, max_entries=self.max_entries)

    def improve(
        self, choices: list[int], price: float = 0.0, *, enough: float = -math.inf
    ) -> list[int]:
        """Return a better assignment than that of a relaxation.

        The first one whose cost is at most `enough` will do.
        """
        # The copies of a split variable may disagree, so the start may meet a forbidden entry:
        # descend on soft tables.
        improving = self._improving = self._improving or _Improving(self.graph, self.max_entries)
        soft = improving.soft

        def value(candidate: Sequence[int]) -> float:
            return soft.cost(candidate) + price * soft.memory_of(candidate)

        best = improving.descent.run(choices, price=price)
        before: dict[int, int] = {}
        for _ in range(ROUNDS):
            settled = {v: best[v] for v in self.fixed}
            if settled == before or value(best) <= enough:
                break  # the rest would be the same again
            rest = improving.rest(settled, price)
            before = settled
            merged = [best[v] if v in self.fixed else choice for v, choice in enumerate(rest)]
            merged = improving.descent.run(merged, price=price)
            if value(merged) >= value(best):
                break
            best = merged
        return best


class _Improving:
    """The parts that all improvements of a graph's assignments share, whatever the price.

    These are its soft tables with their descent, and the solvers of the last cases.
    """

    def __init__(self, graph: CostGraph, max_entries: int) -> None:
        self.soft = soften(graph)
        self.descent = Descent(self.soft)
        self.max_entries = max_entries
        self.known: dict[tuple[tuple[int, int], ...], tuple[Minimiser, Minimum | None]] = {}

    def rest(self, settled: Mapping[int, int], price: float) -> list[int]:
        """The best assignment with these choices of the split variables."""
        key = tuple(settled.items())
        solver, last = self.known.pop(key, (None, None))
        if solver is None:
            solver = Minimiser(
                reduce(condition(self.soft, settled), prune=False).graph,
                max_entries=self.max_entries,
            )
        minimum = solver.minimise(price, last)
        # Put in anew, so that the case asked for longest ago is the first one and goes first.
        self.known[key] = solver, minimum
        if len(self.known) > CASES:
            del self.known[next(iter(self.known))]
        return minimum.choices


def shrink(
    graph: CostGraph, *, max_entries: int = MAX_ENTRIES, memory: bool = True, prune: bool = True
) -> tuple[Reduction, Schedule | None]:
    """Return a smaller graph with its schedule.

    The schedule is None where elimination is more work than pruning; the graph is then pruned, if
    `prune` allows it.
    """
    # Pruning looks at every pair of choices of an edge; eliminating the whole graph is often less.
    small = reduce(graph, prune=False, memory=memory)
    plan = typical_schedule(small.graph)
    if plan.work <= PRUNE_WORK and plan.widest <= max_entries:
        return small, plan
    return reduce(graph, memory=memory) if prune else small, None


def prepare(
    graph: CostGraph, *, max_entries: int = MAX_ENTRIES, memory: bool = True
) -> tuple[Reduction, Minimiser]:
    """Return a smaller graph, with its solver."""
    small, plan = shrink(graph, max_entries=max_entries, memory=memory)
    return small, Minimiser(small.graph, max_entries=max_entries, plan=plan)


def prepared(graph: CostGraph, *, max_entries: int = MAX_ENTRIES) -> tuple[Reduction, Minimiser]:
    """Return what `prepare` gives; where graphs share orders, the last graph's is remembered."""
    return last_of(
        ("prepared", max_entries), graph, lambda: prepare(graph, max_entries=max_entries)
    )
