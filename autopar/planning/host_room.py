"""The memory of the hosts as a second limit of a solution: a price on its bytes, raised until the solution fits.

For every price q >= 0 of a byte in host memory (H. Everett III, 1963)

    min { cost(x) : host(x) <= room }  >=  max over q of  L(q) - q * room
    L(q) = min over x of  cost(x) + q * host(x)

Each L is under the limit of the device's memory. A byte in host memory costs the same for every parameter. So just
below the best price too much of it is used, and just above it perhaps far too little. Between the two, the first
parameters use host memory until it is full, and the others keep their state on the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.costmodel.step.host import host_rate
from autopar.search import CostGraph, Infeasible, Interrupted, NoAssignment, Solution

from .tables import Floats, Tables

Solve = Callable[[CostGraph], Solution]
RUNGS, STRIDE = 4, 8.0
"""The most rising prices, and the factor between them; the first price is the time of copying a byte in."""
BISECTIONS = 3
"""Further prices, between one that is too low and one that fits."""


def solve_within_hosts(tables: Tables, solve: Solve, limit: float) -> Solution:
    """The solution that `solve` finds within `limit` bytes of device memory and the room of the hosts.

    Raises `Infeasible` if no solution found fits both.
    """
    _require_room(tables, limit)
    try:
        first = solve(tables.graph)
        return first if tables.host_of(first.choices) <= tables.host_room else _at_best_price(tables, solve, limit, first)
    except Interrupted as interrupt:
        best = interrupt.best
        fits = best is not None and tables.host_of(best.choices) <= tables.host_room
        raise Interrupted(_of(tables, best) if best is not None and fits else None) from interrupt


def _at_best_price(tables: Tables, solve: Solve, limit: float, first: Solution) -> Solution:
    """The cheapest that fits, of the solutions at several prices and one between two prices."""
    price, low, high = 1.0 / host_rate(tables.prices.cluster.device), 0.0, math.inf
    over, bound = first, first.lower_bound
    found: list[Solution] = []
    for number in range(RUNGS + BISECTIONS):
        tried = solve(replace(tables.graph, unary=_dearer(tables, price)))
        used = tables.host_of(tried.choices)
        bound = max(bound, tried.lower_bound - price * tables.host_room)
        if used <= tables.host_room:
            found.append(_of(tables, tried))
            high = price
        else:
            over, low = tried, price
        if math.isinf(high) and number >= RUNGS:
            break
        # Bisection on the logarithm; the lower end is at most two strides below the price that fits.
        price = STRIDE * price if math.isinf(high) else math.sqrt(max(low, high / STRIDE**2) * high)
    with contextlib.suppress(Infeasible, NoAssignment):
        found.append(_of(tables, solve(replace(tables.graph, unary=_without(tables, over.choices)))))
    fitting = [s for s in found if tables.host_of(s.choices) <= tables.host_room]
    if not fitting:
        raise Infeasible(limit + tables.host_of(over.choices) - tables.host_room, limit)
    best = min(fitting, key=lambda s: s.cost)
    return replace(best, lower_bound=min(max(bound, 0.0), best.cost))


def _require_room(tables: Tables, limit: float) -> None:
    """Raise `Infeasible` if the least bytes of all variables exceed the hosts, or hosts and devices together."""
    pairs = [(v.host, memory) for v, memory in zip(tables.variables, tables.graph.memory or (), strict=True) if v.host is not None]
    if not pairs:
        return
    others = sum(float(memory.min()) for v, memory in zip(tables.variables, tables.graph.memory or (), strict=True) if v.host is None)
    together = others + sum(float((memory + host).min()) for host, memory in pairs)
    if sum(float(host.min()) for host, _ in pairs) > tables.host_room:
        raise Infeasible(math.inf, limit)
    if together > limit + tables.host_room:
        raise Infeasible(together - tables.host_room, limit)


def _of(tables: Tables, tried: Solution) -> Solution:
    """A solution of changed tables, with its cost in the true ones."""
    cost = tables.graph.cost(tried.choices)
    return replace(tried, cost=cost, lower_bound=min(tried.lower_bound, cost))


def _dearer(tables: Tables, price: float) -> tuple[Floats, ...]:
    """The unary tables with a price on each byte in host memory; equal tables stay shared."""
    known: dict[tuple[int, int], Floats] = {}
    return tuple(
        unary if v.host is None else known.setdefault((id(unary), id(v.host)), unary + price * v.host)
        for v, unary in zip(tables.variables, tables.graph.unary, strict=True)
    )


def _without(tables: Tables, choices: Sequence[int]) -> tuple[Floats, ...]:
    """The unary tables in which only the first parameters of `choices` that together fit may use host memory."""
    known: dict[int, Floats] = {}
    left, found = tables.host_room, []
    for v, unary, choice in zip(tables.variables, tables.graph.unary, choices, strict=True):
        if v.host is None:
            found.append(unary)
            continue
        used = float(v.host[choice])
        if 0 < used <= left:
            left -= used
            found.append(np.where(v.host <= used, unary, math.inf))
        else:
            found.append(known.setdefault(id(unary), np.where(v.host > 0, math.inf, unary)))
    return tuple(found)
