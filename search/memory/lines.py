"""The minima of a graph at some prices of a byte: each is a line, and bounds every limit.

    L(p) - p * limit  <=  min { cost(x) : memory(x) <= limit }  <=  cost(x)

This holds for every price p >= 0, and every x within the limit. Of the lines cost(x) + p *
(memory(x) - limit) those over the limit rise and the others fall, and the best price is near the
lowest crossing of a line that rises with one that falls (H. Everett III, Generalized Lagrange
Multiplier Method, 1963).
"""

import math
from dataclasses import dataclass

from ..costgraph import CostGraph
from ..elimination.shared_orders import following


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Point:
    """An assignment, its cost and its memory."""

    choices: list[int]
    cost: float
    memory: float


def point(graph: CostGraph, choices: list[int]) -> Point:
    return Point(choices=choices, cost=graph.cost(choices), memory=graph.memory_of(choices))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tried:
    """A price, L at it, and the assignment that attains it."""

    price: float
    least: float
    point: Point

    def bound(self, limit: float) -> float:
        """Return the seconds that nothing within the limit undercuts."""
        return self.least - self.price * limit


class Lines:
    """The prices that were tried.

    `start`: a price that was best for a graph like this one (0: none is known).
    """

    def __init__(self, start: float = 0.0) -> None:
        self.tried: list[Tried] = []
        self.start = start

    def add(self, price: float, least: float, minimum: Point) -> Tried:
        """Note the assignment that is least at a price, and L."""
        self.tried.append(Tried(price=price, least=least, point=minimum))
        return self.tried[-1]

    def highest(self, limit: float) -> Tried:
        """Return the tried price of the highest bound within a limit."""
        return max(self.tried, key=lambda one: one.bound(limit))

    @property
    def points(self) -> list[Point]:
        """The assignments of the tried prices that are not forbidden."""
        # A relaxation's assignment may meet an infinite entry; its L is a bound all the same.
        return [one.point for one in self.tried if one.point.cost < math.inf]

    def sides(self, limit: float) -> tuple[Point | None, Point | None]:
        """Return the points over the limit and within it whose lines cross lowest.

        Where one side is empty, the nearest point of the other one is returned.
        """
        over = [one for one in self.points if one.memory > limit]
        within = [one for one in self.points if one.memory <= limit]
        # All pairs are compared, since points of a relaxation need not lie on one convex hull: the
        # nearest two on either side may cross higher than others.
        if over and within:
            return min(
                ((one, other) for one in over for other in within),
                key=lambda pair: height(pair[0], pair[1], limit),
            )
        first = min(over, key=lambda one: one.memory, default=None)
        return first, max(within, key=lambda one: one.memory, default=None)

    def best(self, limit: float) -> Point | None:
        """The cheapest point within the limit."""
        return min(
            (one for one in self.points if one.memory <= limit),
            key=lambda one: one.cost,
            default=None,
        )


def crossing(over: Point, within: Point) -> float:
    """Return the price at which two lines cross, at the least 0."""
    # Below 0 what fits is the cheaper one as well, and no limit has a negative price.
    return max((within.cost - over.cost) / (over.memory - within.memory), 0.0)


def height(over: Point, within: Point, limit: float) -> float:
    """Return the height of two lines where they cross."""
    price = crossing(over, within)
    return min(
        over.cost + price * (over.memory - limit), within.cost + price * (within.memory - limit)
    )


def lines_of(graph: CostGraph) -> Lines:
    """Return the lines of a graph.

    Where graphs share orders, those of the last graph are known, and the next one starts where it
    ended.
    """
    return following(
        "lines", graph, lambda last: Lines(last.tried[-1].price if last and last.tried else 0.0)
    )
