"""The Lagrangian dual of a memory limit: the price of a byte whose lower bound is the highest.

For every price p >= 0 (H. Everett III, Generalized Lagrange Multiplier Method, 1963)

    min { cost(x) : memory(x) <= limit }  >=  L(p) - p * limit,    L(p) = min over x of  cost(x) + p * memory(x)

L is concave and piecewise linear. Two assignments, one over the limit and one within, are two lines. The price at
which they cross is tried next, and its optimum replaces one of them, until the crossing is the maximum. At that price
all equal layers are indifferent at once, so the first layers from one optimum with the rest from the other are nearly
optimal (mixtures.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .conditioning import Minimiser, Minimum, prepare
from .costgraph import CostGraph, Infeasible, Table, shared_map
from .elimination import MAX_ENTRIES
from .lines import Lines, Point, point
from .local_search import descend
from .mixtures import arrangement, best_cut

MAX_PRICES = 40
"""The largest number of prices to try."""
TOLERANCE = 1e-12
"""Relative distance of figures that are equal but for rounding."""
FIRST_PRICE = 1 / 16
"""At the first price the memory of the unconstrained optimum costs this share of its time."""
STRIDE = 4.0
"""Factor on the price of a byte while the assignment of least memory is the only known one within the limit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dual:
    """The best price and its bound, the minimum at it or at the last lower one that was evaluated, and the assignments of both sides."""

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
"""Called with choices within the limit, a lower bound of all assignments, and the price whose messages prove it."""


def unheard(choices: list[int], bound: float, price: float) -> None:
    """The `Report` that ignores all."""


def dual_of(
    solver: Minimiser, limit: float, *, close: float, report: Report = unheard, known: Lines | None = None, rough: float = 0.0
) -> tuple[Dual | None, Point, float]:
    """The dual (None if the unconstrained optimum fits), the best assignment found within the limit, and the bound.

    The search for a price ends at a relative gap of `close`. `known`: minima of the solver's graph at other prices, where it begins, and to
    which it adds its own. `rough`: relative distance from the bound at which the assignments of a relaxation are good enough. Raises
    `Infeasible` if nothing fits.
    """
    graph, known, minimum = solver.graph, known or Lines(), None
    if known.start and not known.tried:
        minimum = _try(solver, known.start, None, known, rough)
    over, within = known.sides(limit)
    if over is None:
        minimum = solver.free(close=rough)
        over = point(graph, minimum.choices)
        if over.memory <= limit:
            return None, over, over.cost if solver.exact else minimum.bound
        known.add(0.0, minimum.bound, over)
    # Before anything but the least memory fits, the crossing with it is far too dear, so the price grows by strides.
    highest = known.highest(limit)
    price = STRIDE * highest.price or FIRST_PRICE * abs(over.cost) / over.memory if within is None else math.inf
    within = within or point(graph, least_memory(graph, max_entries=solver.max_entries))
    if within.memory > limit:
        raise Infeasible(within.memory, limit)
    first = Dual(price=highest.price, minimum=minimum, bound=highest.bound(limit), over=over, within=within)
    dual, best = _maximise(solver, limit, first, known, price, close, rough, report)
    best = min(best, point(graph, descend(graph, best.choices, limit=limit)), key=lambda found: found.cost)
    return dual, best, dual.bound


def _try(solver: Minimiser, price: float, last: Minimum | None, known: Lines, rough: float) -> Minimum:
    """The minimum at a price, noted with what is `known`."""
    minimum = solver.minimise(price, last, close=rough)
    known.add(price, minimum.bound, point(solver.graph, minimum.choices))
    return minimum


def least_memory(graph: CostGraph, *, max_entries: int = MAX_ENTRIES) -> list[int]:
    """The assignment of least memory among those of finite cost (any of them, if the graph has no memory tables)."""
    # Bytes become the costs; forbidden entries stay infinite, and edges that forbid nothing are left out.
    allowed = shared_map(lambda table: np.where(np.isinf(table), math.inf, 0.0))
    edges = {edge: allowed(table) for edge, table in graph.edges.items()}
    zero = shared_map(np.zeros_like)
    weights = graph.memory if graph.memory is not None else tuple(zero(table) for table in graph.unary)
    joined: dict[tuple[int, int], Table] = {}
    unary = [joined.setdefault((id(u), id(m)), allowed(u) + m) for u, m in zip(graph.unary, weights, strict=True)]
    binding = {edge: table for edge, table in edges.items() if table.any()}
    small, solver = prepare(CostGraph(sizes=graph.sizes, unary=tuple(unary), edges=binding), max_entries=max_entries)
    return small.restore(solver.minimise().choices)


def _maximise(
    solver: Minimiser, limit: float, dual: Dual, known: Lines, price: float, close: float, rough: float, report: Report
) -> tuple[Dual, Point]:
    """The price of the greatest bound, by crossing lines from `price` on, and the best assignment met; ends at a gap of `close`."""
    graph = solver.graph
    order = arrangement(graph)
    best = min(dual.within, known.best(limit) or dual.within, _mixture(graph, dual, limit, order), key=lambda found: found.cost)
    for _ in range(MAX_PRICES):
        if best.cost - dual.bound <= close * abs(best.cost):
            break
        crossing = (dual.within.cost - dual.over.cost) / (dual.over.memory - dual.within.memory)
        price = min(price, crossing)
        if not 0.0 < price < math.inf:
            break
        minimum = _try(solver, price, dual.minimum, known, rough)
        found = known.tried[-1].point
        bound = minimum.bound - price * limit
        if bound > dual.bound:
            dual = replace(dual, price=price, minimum=minimum, bound=bound)
        # At the maximum, the optimum at the crossing lies on the two lines.
        line = dual.over.cost + price * dual.over.memory
        last = price == crossing and found.cost + price * found.memory >= line - max(TOLERANCE, close / 8) * abs(line)
        # Infinity means: take the crossing.
        price = math.inf if found.memory <= limit or price == crossing else STRIDE * price
        dual = replace(dual, within=found) if found.memory <= limit else replace(dual, over=found)
        best = min(best, dual.within, _mixture(graph, dual, limit, order), key=lambda found: found.cost)
        report(best.choices, dual.bound, dual.price)
        if last:
            break
    return dual, best


def _mixture(graph: CostGraph, dual: Dual, limit: float, order: Sequence[int]) -> Point:
    """The best mixture of the two sides within the limit, with either side first."""
    best = dual.within
    for first, second in ((dual.over.choices, dual.within.choices), (dual.within.choices, dual.over.choices)):
        mixed = best_cut(graph, first, second, limit, order)
        if mixed is not None:
            best = min(best, point(graph, mixed), key=lambda found: found.cost)
    return best
