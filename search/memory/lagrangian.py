"""The Lagrangian dual of a memory limit: the price of a byte whose lower bound is the highest.

For every price p >= 0 (H. Everett III, Generalized Lagrange Multiplier Method, 1963)

    min { cost(x) : memory(x) <= limit }  >=  L(p) - p * limit
    L(p)  =  min over x of  cost(x) + p * memory(x)

L is concave and piecewise linear. Two assignments, one over the limit and one within, are two
lines. The price at which they cross is tried next, and its optimum replaces one of them, until the
crossing is the maximum. At that price all equal layers are indifferent at once, so the first layers
from one optimum with the rest from the other are nearly optimal (mixtures.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..costgraph import CostGraph, Infeasible
from ..elimination.conditioning import Minimiser, Minimum, prepare
from ..elimination.local_search import descend
from ..elimination.order_choice import MAX_ENTRIES
from ..tables import Table, shared_map
from .lines import Lines, Point, point
from .mixtures import arrangement, best_cut

ENTRIES = 1 << 18
"""Entries of the largest table of a quick search under a limit.

In wider graphs variables are split, which weakens the bound (elimination/conditioning.py).
"""
MAX_PRICES = 40
"""The largest number of prices to try."""
TOLERANCE = 1e-12
"""Relative distance of figures that are equal but for rounding."""
FIRST_PRICE = 1 / 16
"""At the first price the memory of the unconstrained optimum costs this share of its time."""
STRIDE = 4.0
"""Factor on the price of a byte while the assignment of least memory is the only known one within
the limit.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dual:
    """The best price of a byte with its bound, and the assignments of both sides.

    `minimum`: the minimum at this price, or at the last lower one that was evaluated. `over`,
    `within`: the assignments over and within the limit whose lines cross there.
    """

    price: float
    minimum: Minimum | None
    bound: float
    over: Point
    within: Point

    @property
    def tables(self) -> list[Table]:
        """The tables of the minimum."""
        assert self.minimum is not None, "no price was evaluated"
        return self.minimum.tables


Report = Callable[[list[int], float, float], None]
"""Called with choices within the limit, a lower bound of all assignments, and the price whose
messages prove it.
"""


def unheard(choices: list[int], bound: float, price: float) -> None:
    """The `Report` that ignores all."""


def dual_of(
    solver: Minimiser,
    limit: float,
    *,
    close: float,
    report: Report = unheard,
    known: Lines | None = None,
    rough: float = 0.0,
) -> tuple[Dual | None, Point, float]:
    """Return the dual of a limit, the best assignment found within the limit, and the bound.

    The dual is None if the unconstrained optimum fits. The search for a price ends at a relative
    gap of `close`. `known`: minima of the solver's graph at other prices, where it begins, and to
    which it adds its own. `rough`: relative distance from the bound at which the assignments of a
    relaxation are good enough. Raises `Infeasible` if nothing fits.
    """
    known = known or Lines()
    search = _PriceSearch(
        solver=solver, limit=limit, known=known, close=close, rough=rough, report=report
    )
    return search.run()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PriceSearch:
    """The search for the best price of a byte of one limit, as `dual_of` describes it."""

    solver: Minimiser
    limit: float
    known: Lines
    close: float
    rough: float
    report: Report

    def run(self) -> tuple[Dual | None, Point, float]:
        """Return the dual, the best assignment within the limit, and the bound."""
        solver = self.solver
        known = self.known
        limit = self.limit
        graph = solver.graph
        minimum = None
        # The best price of the last graph is near this one's. So the minimum without a price, which
        # is mostly far over the limit, is mostly not needed.
        if known.start and not known.tried:
            minimum = self._try(known.start, None)
        over, within = known.sides(limit)
        if over is None:
            minimum = solver.free(close=self.rough)
            over = point(graph, minimum.choices)
            if over.memory <= limit:
                return None, over, over.cost if solver.exact else minimum.bound
            known.add(0.0, minimum.bound, over)
        highest = known.highest(limit)
        price = math.inf
        if within is None:
            # Before anything but the least memory fits, the crossing with it is far too dear, so
            # the price grows by strides.
            price = STRIDE * highest.price or FIRST_PRICE * abs(over.cost) / over.memory
            within = point(graph, least_memory(graph, max_entries=solver.max_entries))
        if within.memory > limit:
            raise Infeasible(within.memory, limit)
        first = Dual(
            price=highest.price,
            minimum=minimum,
            bound=highest.bound(limit),
            over=over,
            within=within,
        )
        dual, best = self._maximise(first, price)
        # A mixture leaves bytes unused, since it takes variables in one order only; the descent
        # lets any variable take them.
        descended = point(graph, descend(graph, best.choices, limit=limit))
        return dual, min(best, descended, key=_cost), dual.bound

    def _try(self, price: float, last: Minimum | None) -> Minimum:
        """Return the minimum at a price, noted with those that are known."""
        minimum = self.solver.minimise(price, last, close=self.rough)
        self.known.add(price, minimum.bound, point(self.solver.graph, minimum.choices))
        return minimum

    def _maximise(self, dual: Dual, price: float) -> tuple[Dual, Point]:
        """Return the dual of the greatest bound, by crossing lines, and the best assignment met.

        Ends at a gap of `close`.
        """
        graph = self.solver.graph
        limit = self.limit
        order = arrangement(graph)
        fitting = self.known.best(limit) or dual.within
        best = min(dual.within, fitting, _mixture(graph, dual, limit, order), key=_cost)
        for _ in range(MAX_PRICES):
            if best.cost - dual.bound <= self.close * abs(best.cost):
                break
            crossing = (dual.within.cost - dual.over.cost) / (dual.over.memory - dual.within.memory)
            price = min(price, crossing)
            if not 0.0 < price < math.inf:
                break
            minimum = self._try(price, dual.minimum)
            optimum = self.known.tried[-1].point
            bound = minimum.bound - price * limit
            # A price beyond the best one bounds less, so the best bound is kept apart from the
            # last.
            if bound > dual.bound:
                dual = replace(dual, price=price, minimum=minimum, bound=bound)
            # At the maximum, the optimum at the crossing lies on the two lines.
            line = dual.over.cost + price * dual.over.memory
            margin = max(TOLERANCE, self.close / 8) * abs(line)
            last = price == crossing and optimum.cost + price * optimum.memory >= line - margin
            # While only the least memory is known to fit, the price grows by strides. As soon as
            # anything else fits, infinity makes `min` above take the crossing.
            if optimum.memory <= limit or price == crossing:
                price = math.inf
            else:
                price = STRIDE * price
            if optimum.memory <= limit:
                dual = replace(dual, within=optimum)
            else:
                dual = replace(dual, over=optimum)
            best = min(best, dual.within, _mixture(graph, dual, limit, order), key=_cost)
            self.report(best.choices, dual.bound, dual.price)
            if last:
                break
        return dual, best


def _cost(candidate: Point) -> float:
    return candidate.cost


def least_memory(graph: CostGraph, *, max_entries: int = MAX_ENTRIES) -> list[int]:
    """Return the assignment of least memory among those of finite cost.

    It is any of them if the graph has no memory tables.
    """
    # Bytes become the costs; forbidden entries stay infinite, and edges that forbid nothing are
    # left out.
    allowed = shared_map(lambda table: np.where(np.isinf(table), math.inf, 0.0))
    edges = {edge: allowed(table) for edge, table in graph.edges.items()}
    zero = shared_map(np.zeros_like)
    weights = (
        graph.memory if graph.memory is not None else tuple(zero(table) for table in graph.unary)
    )
    numbers = graph.numbers
    joined: dict[tuple[int, int], Table] = {}
    unary = []
    pairs = zip(numbers.unary, numbers.memory or [-1] * len(graph.sizes), strict=True)
    for pair, costs, weight in zip(pairs, graph.unary, weights, strict=True):
        if pair not in joined:
            joined[pair] = allowed(costs) + weight
        unary.append(joined[pair])
    binding = {edge: table for edge, table in edges.items() if table.any()}
    small, solver = prepare(
        CostGraph(derived=True, sizes=graph.sizes, unary=tuple(unary), edges=binding),
        max_entries=max_entries,
    )
    return small.restore(solver.minimise().choices)


def _mixture(graph: CostGraph, dual: Dual, limit: float, order: Sequence[int]) -> Point:
    """The best mixture of the two sides within the limit, with either side first."""
    best = dual.within
    for first, second in (
        (dual.over.choices, dual.within.choices),
        (dual.within.choices, dual.over.choices),
    ):
        mixed = best_cut(graph, first, second, limit, order)
        if mixed is not None:
            best = min(best, point(graph, mixed), key=_cost)
    return best
