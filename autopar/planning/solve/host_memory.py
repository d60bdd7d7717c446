"""The memory of the hosts as a second limit of a solution: a price on its bytes, raised until the
solution fits.

For every price q >= 0 of a byte in host memory (H. Everett III, 1963)

    min { cost(x) : host(x) <= room }  >=  max over q of  L(q) - q * room
    L(q) = min over x of  cost(x) + q * host(x)

Each L is under the limit of the device's memory. A byte in host memory costs the same for every
parameter. So just below the best price too much of it is used, and just above it perhaps far too
little. Between the two, the first parameters use host memory until it is full, and the others keep
their state on the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.costmodel.step.host_offload import host_rate
from autopar.planning.tables.tables import Choices, Floats, Tables
from autopar.search import CostGraph, Infeasible, Interrupted, NoAssignment, Solution

Solve = Callable[[CostGraph], Solution]
RUNGS = 4
STRIDE = 8.0
"""The most rising prices, and the factor between them; the first price is the time of copying a
byte in.
"""
BISECTIONS = 3
"""Further prices, between one that is too low and one that fits."""


def solve_within_hosts(tables: Tables, solve: Solve, limit: float) -> Solution:
    """The solution that `solve` finds within `limit` bytes of device memory and the room of the
    hosts.

    Raises `Infeasible` if no solution that was tried fits both.
    """
    _require_room(tables, limit)
    try:
        first = solve(tables.graph)
        return (
            first
            if tables.host_of(first.choices) <= tables.host_room
            else _at_best_price(tables, solve, limit, first)
        )
    except Interrupted as interrupt:
        best = interrupt.best
        fits = best is not None and tables.host_of(best.choices) <= tables.host_room
        # Solved with a price on host memory, it must not leave with the cost under that price.
        raise Interrupted(_of(tables, best) if best is not None and fits else None) from interrupt


def _at_best_price(tables: Tables, solve: Solve, limit: float, first: Solution) -> Solution:
    """The cheapest that fits, of the solutions at several prices and one between two prices."""
    price = 1.0 / host_rate(tables.prices.cluster.device)
    low = 0.0
    high = math.inf
    over = first
    bound = first.lower_bound
    fitting: list[Solution] = []
    for number in range(RUNGS + BISECTIONS):
        tried = solve(replace(tables.graph, unary=_dearer(tables, price)))
        used = tables.host_of(tried.choices)
        # Every price gives a bound, by the formula above; the highest one counts.
        bound = max(bound, tried.lower_bound - price * tables.host_room)
        if used <= tables.host_room:
            fitting.append(_of(tables, tried))
            high = price
        else:
            over = tried
            low = price
        # No price made it fit, so that there is no upper end to bisect from.
        if math.isinf(high) and number >= RUNGS:
            break
        # Bisection on the logarithm; the lower end is at most two strides below the price that
        # fits.
        price = STRIDE * price if math.isinf(high) else math.sqrt(max(low, high / STRIDE**2) * high)
    with contextlib.suppress(Infeasible, NoAssignment):
        last = solve(replace(tables.graph, unary=_without(tables, over.choices)))
        if tables.host_of(last.choices) <= tables.host_room:
            fitting.append(_of(tables, last))
    if not fitting:
        raise Infeasible(limit + tables.host_of(over.choices) - tables.host_room, limit)
    best = min(fitting, key=lambda s: s.cost)
    return replace(best, lower_bound=min(max(bound, 0.0), best.cost))


def _require_room(tables: Tables, limit: float) -> None:
    """Raise `Infeasible` if the least bytes of all variables exceed the hosts, or hosts and devices
    together.
    """
    pairs = [
        (v.host, memory)
        for v, memory in zip(tables.variables, tables.graph.memory or (), strict=True)
        if v.host is not None
    ]
    if not pairs:
        return
    others = sum(
        float(memory.min())
        for v, memory in zip(tables.variables, tables.graph.memory or (), strict=True)
        if v.host is None
    )
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
    known: dict[Choices, Floats] = {}
    for offered in tables.offered:
        if offered not in known:
            known[offered] = offered.seconds
            if offered.host is not None:
                known[offered] = offered.seconds + price * offered.host
    return tuple(known[offered] for offered in tables.offered)


def _without(tables: Tables, choices: Sequence[int]) -> tuple[Floats, ...]:
    """The unary tables in which only the first parameters of `choices` that together fit may use
    host memory.
    """
    on_device: dict[Choices, Floats] = {}
    left = tables.host_room
    unary = []
    for offered, choice in zip(tables.offered, choices, strict=True):
        if offered.host is None:
            unary.append(offered.seconds)
            continue
        used = float(offered.host[choice])
        if 0 < used <= left:
            left -= used
            # Layouts with no more bytes on the host than these stay open, as they fit as well.
            unary.append(np.where(offered.host <= used, offered.seconds, math.inf))
            continue
        if offered not in on_device:
            on_device[offered] = np.where(offered.host > 0, math.inf, offered.seconds)
        unary.append(on_device[offered])
    return tuple(unary)
