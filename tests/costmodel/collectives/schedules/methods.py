"""`Method`: an algorithm for a collective, as the rounds that it runs and the closed form of its
time; and how methods are put together.

time = sum over levels of steps * latency + traffic * bytes * max(1, drivers that share a port) /
rate
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tests.costmodel.collectives.schedules.schedule import Round, backwards

SEGMENTS = 8
"""Into how many segments pipelined algorithms cut the bytes (1), unless told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The group: its branches on each level from the inside out, and the segments of pipelined
    algorithms.
    """

    sizes: tuple[int, ...]
    segments: int = SEGMENTS

    @property
    def ranks(self) -> int:
        """Members of the group."""
        return math.prod(self.sizes)

    @property
    def inside(self) -> tuple[int, ...]:
        """Members inside one branch of each level."""
        return tuple(itertools.accumulate(self.sizes[:-1], lambda a, b: a * b, initial=1))

    def lines(self, level: int, *, leaders: bool = False) -> list[list[int]]:
        """The ranks that differ on one level only, line by line; `leaders`: only those that come
        first on all levels inside it.
        """
        unit = self.inside[level]
        size = self.sizes[level]
        starts = [
            rank
            for rank in range(self.ranks)
            if rank // unit % size == 0 and not (leaders and rank % unit)
        ]
        return [[start + unit * i for i in range(size)] for start in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """On one level: steps, traffic as a multiple of the bytes, and how many members in a branch of
    it drive its links at once.
    """

    steps: float
    traffic: float
    drivers: int = 1


Rounds = Callable[[Shape], list[Round]]
Costs = Callable[[Shape], list[Cost]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One algorithm for one collective: its rounds, its costs on each level, and the chunks that
    the bytes are cut into.

    `levels`: it knows levels; other methods run over one. `empty`: its messages have no bytes.
    """

    rounds: Rounds
    costs: Costs
    parts: Callable[[Shape], int] = lambda shape: shape.ranks
    levels: bool = False
    empty: bool = False


def flat(steps: float, traffic: float) -> list[Cost]:
    """The costs on a single level."""
    return [Cost(steps=steps, traffic=traffic)]


def share(n: int) -> float:
    """All but one of n parts."""
    return (n - 1) / n


def after(*parts: Costs) -> Costs:
    """The costs of one after the other."""

    def costs(shape: Shape) -> list[Cost]:
        rows: Iterable[tuple[Cost, ...]] = zip(*(part(shape) for part in parts), strict=True)
        return [
            Cost(
                steps=sum(c.steps for c in row),
                traffic=sum(c.traffic for c in row),
                drivers=row[0].drivers,
            )
            for row in rows
        ]

    return costs


def then(*parts: Rounds) -> Rounds:
    """The rounds of one after the other."""
    return lambda shape: [messages for part in parts for messages in part(shape)]


def without_bytes(costs: Costs) -> Costs:
    """The costs of the same messages with nothing in them."""
    return lambda shape: [replace(cost, traffic=0.0) for cost in costs(shape)]


def back(rounds: Rounds, *, reduce: bool) -> Rounds:
    """The rounds backwards."""
    return lambda shape: backwards(rounds(shape), reduce=reduce)
