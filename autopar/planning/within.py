"""What no plan of a candidate without stages undercuts within the memory.

With T_l(x) the seconds of strategies x with the most of what parameters send hidden, for l in [0, 1] (`most_hidden`), stored, gradients and
kept the bytes of a device,

    step >= max over l of  min over x of  T_l(x)
            subject to     stored(x) + gradients(x) + kept(x) <= limit

in the mode of recompute and ZeRO where that is least. When the last forward pass ends, the gradients of the micro-batches before it are
there, and all that its backward pass needs; with one micro-batch no gradients are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable

from autopar.search import Infeasible, NoAssignment, nearly, solve

from .solving import QUICK_METHOD
from .tables import Tables
from .tuning import TUNING

COVERS = (0.0, 0.5, 0.9, 1.0)
"""The l that are tried, as long as the bound rises."""


def least_within(every: Iterable[Callable[[float], Tables]], room: float, enough: float, wanted: float) -> float:
    """The least that tables of all modes, made for an l, add up to within `room` bytes: above `wanted` any bound of it.

    Where it is no more than `enough`, any bound, too.
    """
    found = math.inf
    for tables in every:
        with contextlib.suppress(Infeasible, NoAssignment):
            if nearly(tables(0.0).graph, close=TUNING.bounded).lower_bound < found:
                found = min(found, _highest(tables, room, min(found, wanted)))
        if found <= enough:
            break
    return found


def _highest(tables: Callable[[float], Tables], room: float, wanted: float) -> float:
    """The highest bound of a mode; once it is above `wanted`, or the last solution shows that it cannot rise, none follows."""
    best, choices = -math.inf, None
    for covers in COVERS:
        graph = tables(covers).graph
        if choices is not None and graph.cost(choices) <= best * (1 + TUNING.certain):
            break
        found = solve(graph, method=QUICK_METHOD, memory_limit=room)
        if found.lower_bound <= best:
            break
        best, choices = found.lower_bound, found.choices
        if best >= wanted:
            break
    return best


def without_gradients(tables: Tables) -> Tables:
    """Tables whose parameters take no memory for gradients."""
    types = tables.types
    # Of the bytes that `storage_bytes` has for a gradient, as it is stored or as it is reduced.
    return tables.lighter(lambda tensor, shards: max(types.stored_bytes(tensor), types.reduced_bytes(tensor)) / shards)
