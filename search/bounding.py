"""The bound of a memory limit without an assignment: a few prices of a byte from one that is near, as long as the bound rises.

    min { cost(x) : memory(x) <= limit }  >=  L(p) - p * limit        for every price p; L as of lagrangian.py

Two minima, one over the limit and one within, are two lines, and the next price is where they cross.
"""

import math
from dataclasses import dataclass

from .conditioning import prepared
from .costgraph import CostGraph, memory_tables
from .lagrangian import FIRST_PRICE, STRIDE
from .lines import Point, crossing, lines_of, point
from .relaxation import ENTRIES

PRICES = 8
"""Prices that are tried at most."""
NEAR = 1e-3
"""Relative distance from what no price gives at which a bound is near enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A bound that no assignment within the limit undercuts, the price that gives it, and the choices that are least at this price."""

    bound: float
    price: float
    choices: tuple[int, ...]


def bound_within(graph: CostGraph, limit: float, *, price: float = 0.0, enough: float = math.inf, or_nothing: bool = False) -> Bounded:
    """A bound that is `enough`, or nearly the best of all prices, found from `price` on; with `or_nothing`, any where none is enough."""
    memory_tables(graph)
    small, solver = prepared(graph, max_entries=ENTRIES)
    known, minimum = lines_of(graph), None
    over, within = known.sides(limit)
    price = crossing(over, within) if over and within else price
    for _ in range(PRICES if not known.tried or known.highest(limit).bound(limit) < enough else 0):
        minimum = solver.minimise(price, minimum, improve=False)
        found = known.add(price, minimum.bound, point(solver.graph, minimum.choices)).point
        # Where the lines cross no bound is higher than they are there.
        line = over.cost + price * (over.memory - limit) if over and within else math.inf
        if found.memory > limit:
            over = found
        else:
            within = found
        bound = known.highest(limit).bound(limit)
        if bound >= enough or (over is None and price == 0.0) or bound >= line - NEAR * abs(line):
            break
        # No bound is above what fits, and none of these prices' above the lines.
        if or_nothing and min(line, within.cost if within else math.inf) < enough:
            break
        price = _next(price, over, within, limit)
    best = known.highest(limit)
    return Bounded(bound=best.bound(limit), price=best.price, choices=tuple(small.restore(best.point.choices)))


def _next(price: float, over: Point | None, within: Point | None, limit: float) -> float:
    """The price at which the lines cross, or one further to the side of which there is none."""
    if over is None:
        return price / STRIDE if price > 0 else 0.0
    if within is None:
        return STRIDE * price or FIRST_PRICE * abs(over.cost) / over.memory
    return crossing(over, within)
