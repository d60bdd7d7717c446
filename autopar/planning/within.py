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
import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from autopar.search import NoAssignment, nearly
from autopar.search.bounding import bound_within
from autopar.search.lagrangian import least_memory

from .candidates import Candidate
from .parameter_traffic import most_hidden
from .solved_candidate import Mode
from .tables import Tables
from .tuning import TUNING

if TYPE_CHECKING:
    from .candidate_solver import CandidateSolver

COVERS = (0.0, 0.5, 0.9, 1.0)
"""The l that are tried, as long as the bound rises."""


def surely(solver: CandidateSolver, candidate: Candidate, enough: float, wanted: float) -> float:
    """Seconds that no step of a candidate without stages undercuts within the memory (see `least_within`)."""
    early = solver.bounds.early(1, candidate.mesh).before
    every = (functools.partial(loosest, solver, candidate, mode) for mode in solver.modes(candidate.micro_batches))
    return least_within(every, solver.room(candidate), enough + early, wanted + early) - early


def loosest(solver: CandidateSolver, candidate: Candidate, mode: Mode, covers: float = 0.0) -> Tables:
    """The tables of a candidate with all hidden (`covers`: see `most_hidden`), and only bytes that are surely there at once."""
    work = most_hidden(solver.work(candidate, mode, solver.folded.counts, short=True), solver.prices(candidate), covers)
    tables = solver.request.offering(solver.plain_tables(candidate, work), candidate.stages)
    return without_gradients(tables) if solver.request.train and candidate.micro_batches == 1 else tables


def least_within(every: Iterable[Callable[[float], Tables]], room: float, enough: float, wanted: float) -> float:
    """The least that tables of all modes, made for an l, add up to within `room` bytes: above `wanted` any bound of it.

    Where it is no more than `enough`, any bound, too.
    """
    found, price = math.inf, 0.0
    for tables in every:
        with contextlib.suppress(NoAssignment):
            graph = tables(0.0).graph
            free = nearly(graph, close=TUNING.bounded).lower_bound
            if free < found and graph.memory_of(least_memory(graph)) <= room:
                # What is above the least of the modes so far need not be known any closer.
                highest, price = _highest(tables, room, min(found, wanted), price)
                found = min(found, max(free, highest))
        if found <= enough:
            break
    return found


def _highest(tables: Callable[[float], Tables], room: float, wanted: float, price: float) -> tuple[float, float]:
    """The highest bound of a mode, and the price of a byte that gave the last one tried.

    Once it is above `wanted`, or the choices of the last one show that at its price it cannot rise, no further one is tried.
    """
    best, choices = -math.inf, None
    for covers in COVERS:
        graph = tables(covers).graph
        if choices is not None and graph.cost(choices) + price * (graph.memory_of(choices) - room) <= best * (1 + TUNING.certain):
            break
        near = bound_within(graph, room, price=price, enough=wanted)
        price, choices, risen = near.price, near.choices, near.bound > best
        best = max(best, near.bound)
        if best >= wanted or not risen:
            break
    return best, price


def without_gradients(tables: Tables) -> Tables:
    """Tables whose parameters take no memory for gradients."""
    types = tables.types
    # Of the bytes that `storage_bytes` has for a gradient, as it is stored or as it is reduced.
    return tables.lighter(lambda tensor, shards: max(types.stored_bytes(tensor), types.reduced_bytes(tensor)) / shards)
