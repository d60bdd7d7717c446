"""Bounds of candidates without stages within the memory of a device.

With T_l(x) the seconds of strategies x with the most of what parameters send hidden, for l in [0,
1] (`most_hidden`) and M(x) the bytes that are surely there at once,

    step >= max over l of  min over x of  T_l(x)    subject to  M(x) <= limit

in the mode of recompute and ZeRO where that is least.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable

from autopar.planning.model.effort import EFFORT
from autopar.planning.tables import Tables
from autopar.search import NoAssignment, bound_within, least_memory, nearly

COVERS = (0.0, 0.5, 0.9, 1.0)
"""The l that are tried, as long as the bound rises."""


def least_within(
    every: Iterable[Callable[[float], Tables]], room: float, enough: float, wanted: float
) -> float:
    """Return the least that tables of all modes add up to within `room` bytes.

    `every`: makes the tables of each mode for an l. Above `wanted`, and up to `enough`, any bound
    of it is returned.
    """
    least = math.inf
    price = 0.0
    for tables in every:
        with contextlib.suppress(NoAssignment):
            graph = tables(0.0).graph
            free = nearly(graph, close=EFFORT.bounded).lower_bound
            if free < least and graph.memory_of(least_memory(graph)) <= room:
                # What is above the least of the modes so far need not be known any closer.
                highest, price = _highest(tables, room, min(least, wanted), price)
                least = min(least, max(free, highest))
        if least <= enough:
            break
    return least


def _highest(
    tables: Callable[[float], Tables], room: float, wanted: float, price: float
) -> tuple[float, float]:
    """Return the highest bound of a mode, and the last price of a byte that was tried.

    Once it is above `wanted`, or the choices of the last one show that at its price it cannot rise,
    no further one is tried.
    """
    best = -math.inf
    choices = None
    for covers in COVERS:
        graph = tables(covers).graph
        if choices is not None and graph.cost(choices) + price * (
            graph.memory_of(choices) - room
        ) <= best * (1 + EFFORT.bounded):
            break
        near = bound_within(graph, room, price=price, enough=wanted)
        price = near.price
        choices = near.choices
        risen = near.bound > best
        best = max(best, near.bound)
        if best >= wanted or not risen:
            break
    return best, price
