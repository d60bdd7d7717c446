"""Bounds of a memory limit without an assignment, from a few prices of a byte.

    min { cost(x) : memory(x) <= limit }  >=  L(p) - p * limit        for every price p

L is that of lagrangian.py. Two minima, one over the limit and one within, are two lines, and the
next price is where they cross. The prices end when the bound no longer rises. Source: H. Everett
III, Generalized Lagrange Multiplier Method, 1963.
"""

import math
from dataclasses import dataclass

from ..costgraph import CostGraph, memory_tables
from ..elimination.conditioning import Minimiser, prepared
from ..elimination.shared_orders import last_of
from .lagrangian import ENTRIES, FIRST_PRICE, STRIDE
from .lines import Lines, Point, crossing, lines_of, point

PRICES = 8
"""Prices that are tried at most."""
HEAVY_WORK = 5e8
"""Additions of a minimum above which narrow tables come first, which mostly prove enough."""
QUICK = 1 << 16
"""Entries of the largest of these narrow tables."""
NEAR = 1e-3
"""Relative distance from what no price gives at which a bound is near enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A bound that no assignment within the limit undercuts.

    `price` is the price of a byte that gives it, `choices` those that are least at this price.
    """

    bound: float
    price: float
    choices: tuple[int, ...]


def bound_within(
    graph: CostGraph, limit: float, *, price: float = 0.0, enough: float = math.inf
) -> Bounded:
    """Return a bound that is `enough`, or nearly the best of all prices.

    The search for a price begins at `price`.
    """
    memory_tables(graph)
    small, solver = prepared(graph, max_entries=ENTRIES)
    known = lines_of(graph)
    # The bound of narrow tables is lower, but it costs less and is mostly `enough` already.
    if solver.plan.work > HEAVY_WORK:
        _raise(
            last_of("quick bounds", graph, lambda: Minimiser(small.graph, max_entries=QUICK)),
            known,
            limit,
            price,
            enough,
        )
    if not known.tried or known.highest(limit).bound(limit) < enough:
        _raise(solver, known, limit, price, enough)
    best = known.highest(limit)
    return Bounded(
        bound=best.bound(limit), price=best.price, choices=tuple(small.restore(best.point.choices))
    )


def _raise(solver: Minimiser, known: Lines, limit: float, price: float, enough: float) -> None:
    """Try prices until the bound is enough, or nearly the best."""
    minimum = None
    # An earlier call for the same graph may have tried prices on both sides of the limit.
    over, within = known.sides(limit)
    price = crossing(over, within) if over and within else price
    for _ in range(PRICES):
        minimum = solver.minimise(price, minimum, improve=False)
        optimum = known.add(price, minimum.bound, point(solver.graph, minimum.choices)).point
        # Where the lines cross no bound is higher than they are there.
        line = over.cost + price * (over.memory - limit) if over and within else math.inf
        # The newest line of each side is the nearest to the best price.
        if optimum.memory > limit:
            over = optimum
        else:
            within = optimum
        bound = known.highest(limit).bound(limit)
        if bound >= enough or (over is None and price == 0.0) or bound >= line - NEAR * abs(line):
            break
        price = _next(price, over, within, limit)


def _next(price: float, over: Point | None, within: Point | None, limit: float) -> float:
    """Return the price at which the lines cross, or one further towards the side without a line."""
    if over is None:
        return price / STRIDE if price > 0 else 0.0
    # The first price is in proportion to the graph's own seconds a byte, as no unit of either is
    # known here.
    if within is None:
        return STRIDE * price or FIRST_PRICE * abs(over.cost) / over.memory
    return crossing(over, within)
