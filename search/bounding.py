"""The bound of a memory limit without an assignment: a few prices of a byte from one that is near, as long as the bound rises.

    min { cost(x) : memory(x) <= limit }  >=  L(p) - p * limit        for every price p; L as of lagrangian.py

Two minima, one over the limit and one within, are two lines, and the next price is where they cross.
"""

import math
from dataclasses import dataclass

from .conditioning import Minimiser, prepared
from .costgraph import CostGraph, memory_tables
from .elimination import last_of
from .lagrangian import FIRST_PRICE, STRIDE
from .lines import Lines, Point, crossing, height, lines_of, point
from .relaxation import ENTRIES

PRICES = 8
"""Prices that are tried at most."""
HEAVY_WORK, QUICK = 5e8, 1 << 16
"""Additions of a minimum above which tables of at most so many entries come first, which mostly prove enough."""
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
    known = lines_of(graph)
    if solver.plan.work > HEAVY_WORK:
        _raise(last_of("quick bounds", graph, lambda _: Minimiser(small.graph, max_entries=QUICK)), known, limit, price, enough, or_nothing)
    if not known.tried or not _is_settled(known, limit, enough, or_nothing):
        _raise(solver, known, limit, price, enough, or_nothing)
    best = known.highest(limit)
    return Bounded(bound=best.bound(limit), price=best.price, choices=tuple(small.restore(best.point.choices)))


def _is_settled(known: Lines, limit: float, enough: float, or_nothing: bool) -> bool:
    """Whether the bound is known to be enough; with `or_nothing`, or not to be, as none is above where the lines cross."""
    if known.highest(limit).bound(limit) >= enough:
        return True
    over, within = known.sides(limit)
    return or_nothing and over is not None and within is not None and height(over, within, limit) < enough


def _raise(solver: Minimiser, known: Lines, limit: float, price: float, enough: float, or_nothing: bool) -> None:
    """Try prices until the bound is enough, or nearly the best; with `or_nothing`, or surely not enough."""
    minimum, (over, within) = None, known.sides(limit)
    price = crossing(over, within) if over and within else price
    for _ in range(PRICES):
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


def _next(price: float, over: Point | None, within: Point | None, limit: float) -> float:
    """The price at which the lines cross, or one further to the side of which there is none."""
    if over is None:
        return price / STRIDE if price > 0 else 0.0
    if within is None:
        return STRIDE * price or FIRST_PRICE * abs(over.cost) / over.memory
    return crossing(over, within)
