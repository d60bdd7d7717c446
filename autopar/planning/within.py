"""What no plan of a candidate without stages undercuts within the memory.

With X(x) all seconds of strategies x but those of parameters' collectives, S(x) these, h the share of them that is hidden at the best
(`most_hidden`), stored, gradients and kept the bytes of a device,

    step >= min over x of  X(x) + (1 - h) S(x)
            subject to     stored(x) + gradients(x) + kept(x) <= limit

in the mode of recompute and ZeRO where that is least. When the last forward pass ends, the gradients of the micro-batches before it are
there, and all that its backward pass needs; with one micro-batch no gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autopar.search import NoAssignment, nearly
from autopar.search.bounding import bound_within
from autopar.search.lagrangian import least_memory

from .tables import Tables
from .tuning import TUNING


def least_within(every: Iterable[Tables], room: float, enough: float) -> float:
    """The least that tables of all modes add up to within `room` bytes; where that is no more than `enough`, any bound of it."""
    found, price = math.inf, 0.0
    for tables in every:
        try:
            free, graph = nearly(tables.graph, close=TUNING.bounded).lower_bound, tables.graph
            if free < found and graph.memory_of(least_memory(graph)) <= room:
                # What is above the least of the modes so far need not be known any closer.
                near = bound_within(graph, room, price=price, enough=found)
                found, price = min(found, max(free, near.bound)), near.price
        except NoAssignment:
            continue
        if found <= enough:
            break
    return found


def without_gradients(tables: Tables) -> Tables:
    """Tables whose parameters take no memory for gradients."""
    types = tables.types
    # Of the bytes that `storage_bytes` has for a gradient, as it is stored or as it is reduced.
    return tables.lighter(lambda tensor, shards: max(types.stored_bytes(tensor), types.reduced_bytes(tensor)) / shards)
