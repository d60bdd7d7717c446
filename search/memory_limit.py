"""The memory limit: a price on bytes bounds the optimum from below, and mixed optima and labelled search close the gap.

Lagrangian duality (H. Everett III, 1963): for every price p >= 0

    min { cost(x) : memory(x) <= limit }  >=  L(p) - p * limit,    L(p) = min over x of  cost(x) + p * memory(x)

L is concave and piecewise linear. Two assignments, one over the limit and one within, are two lines; the price at which they
cross is tried next, and its optimum replaces one of them, until the crossing is the maximum. There all equal layers are
indifferent at once, so the first layers from one optimum and the rest from the other are nearly optimal (mixtures.py). A large graph
is done when the gap is at most `CLOSE`, or when no price narrows it; the gap of a small one is closed (labels.py, branching).
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .conditioning import Minimiser, Minimum, condition, prepare, restrict
from .costgraph import CostGraph, Infeasible, NoAssignment, Table, memory_tables, shared_map
from .elimination import MAX_ENTRIES
from .filtering import marginals, survivors
from .labels import ROOMS, label_search
from .local_search import descend
from .mixtures import arrangement, best_cut

MAX_PRICES = 40
TOLERANCE = 1e-12
FIRST_PRICE = 1 / 16
"""The first price is that at which the memory of the free optimum costs this share of its time."""
STRIDE = 4.0
"""How much dearer a byte gets while nothing within the limit is known but the assignment of least memory."""
CLOSE = 1e-3
"""Relative gap at which a large graph is done."""
EXACT_CHOICES = 2048
"""Choices of all variables up to which a graph is small: its gap is closed."""
GOOD_ENOUGH = 1e-5
"""Relative gap below which no variable is branched on."""
FEWER = 0.9
"""Share of the choices that must be left at most after a filter for the search to be done again on them."""
MANY, WIDE_GAP = 1000, 1e-2
"""A graph of more variables is only filtered if its relative gap is wider: it takes a second, and equal layers lose little."""
FILTERED_VOLUME = 1e8
WORTH = 8
"""Entries of all cliques, equal ones counted each time, above which no filter is tried: half a second, or `WORTH` times that if the gap
is wide."""
HUB_DEGREE = 8
BRANCH_DEPTH = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Point:
    """An assignment and its two figures."""

    choices: list[int]
    cost: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dual:
    """The best price, its minimum and bound, and the two assignments on either side of the limit."""

    price: float
    minimum: Minimum
    bound: float
    over: _Point
    within: _Point


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The best assignment found, and a bound; the messages at `price` prove `proven` of it, enumeration the rest."""

    choices: list[int]
    bound: float
    price: float
    proven: float


Report = Callable[[list[int], float, float], None]
"""Told of choices within the limit, a bound that no assignment undercuts, and the price whose messages prove it."""


def unheard(choices: list[int], bound: float, price: float) -> None:
    """Nobody listens."""


def constrained(
    solver: Minimiser, limit: float, *, cutoff: float = math.inf, depth: int = BRANCH_DEPTH, report: Report = unheard
) -> Outcome:
    """The best assignment found within `limit`, and a bound that no assignment within it undercuts (or that reaches `cutoff`)."""
    graph = solver.graph
    memory_tables(graph)
    free = solver.minimise()
    over = _point(graph, free.choices)
    if over.memory <= limit:
        return Outcome(choices=over.choices, bound=over.cost if solver.exact else free.bound, price=0.0, proven=free.bound)
    within = _point(graph, least_memory(graph, max_entries=solver.max_entries))
    if within.memory > limit:
        raise Infeasible(within.memory, limit)
    small = sum(graph.sizes) <= EXACT_CHOICES
    dual, best = _maximise(solver, limit, free, over, within, 0.0 if small else CLOSE, report)
    best = min(best, _point(graph, descend(graph, best.choices, limit=limit)), key=lambda point: point.cost)
    target = min(best.cost, cutoff)
    enough = TOLERANCE if small else CLOSE if len(graph.sizes) <= MANY else WIDE_GAP
    gap = (target - dual.bound) / max(abs(target), 1e-300)
    if gap > enough and solver.plan.volume <= FILTERED_VOLUME * (1 if gap <= WIDE_GAP else WORTH):
        rest = _filtered(solver, limit, dual, best, target, depth, report)
        if rest is not None:
            return rest
    bound = dual.bound
    for number, room in enumerate(ROOMS if solver.exact and small else ()):
        target = min(best.cost, cutoff)
        if target - bound <= TOLERANCE * abs(target):
            break
        hub = _hub(graph, dual)
        report(best.choices, dual.bound, dual.price)
        if number and depth and hub is not None and target - bound > GOOD_ENOUGH * abs(target):
            best, bound = _branch(solver, limit, hub, dual, best, bound, cutoff, depth - 1)
            break
        gap = target - dual.bound
        better, excluded = label_search(graph, solver.plan, dual.minimum.tables, price=dual.price, limit=limit, gap=gap, room=room)
        if better is not None and graph.cost(better) < best.cost:
            best = _point(graph, descend(graph, better, limit=limit))
        bound = max(bound, min(best.cost, cutoff, excluded))
    return Outcome(choices=best.choices, bound=bound, price=dual.price, proven=dual.bound)


def _filtered(
    solver: Minimiser, limit: float, dual: _Dual, best: _Point, target: float, depth: int, report: Report
) -> Outcome | None:
    """The same on what is left when all choices that lead to `target` or more are gone; None if too few are."""
    graph = solver.graph
    kept = survivors(solver, marginals(solver.plan, dual.minimum.tables), target + dual.price * limit)
    bound = target
    if kept is not None:
        if sum(map(len, kept)) > FEWER * sum(graph.sizes):
            return None
        small, child = prepare(restrict(graph, kept), max_entries=solver.max_entries)

        def restored(choices: Sequence[int]) -> list[int]:
            return [int(keep[choice]) for keep, choice in zip(kept, small.restore(choices), strict=True)]

        try:
            found = constrained(
                child, limit, cutoff=target, depth=depth,
                report=lambda choices, bound, price: report(restored(choices), dual.bound, dual.price),
            )  # fmt: skip
            best = min(best, _point(graph, restored(found.choices)), key=lambda point: point.cost)
            bound = min(target, found.bound)
        except (Infeasible, NoAssignment):
            pass
    return Outcome(choices=best.choices, bound=max(bound, dual.bound), price=dual.price, proven=dual.bound)


def _hub(graph: CostGraph, dual: _Dual) -> int | None:
    """The variable of most edges among those on which the two sides differ, if it has many."""
    degree = Counter(v for edge in graph.edges for v in edge)
    differing = [v for v in degree if degree[v] >= HUB_DEGREE and dual.over.choices[v] != dual.within.choices[v]]
    return max(differing, key=lambda v: (degree[v], -v), default=None)


def _branch(
    solver: Minimiser, limit: float, hub: int, dual: _Dual, best: _Point, bound: float, cutoff: float, depth: int
) -> tuple[_Point, float]:
    """Settle the hub, choice by choice, the most promising first: without it, the layers' mixtures are nearly free."""
    graph = solver.graph
    children = []
    for choice in range(graph.sizes[hub]):
        try:
            small, child = prepare(condition(graph, {hub: choice}), max_entries=solver.max_entries)
            children.append((child.minimise(dual.price).bound - dual.price * limit, choice, small, child))
        except NoAssignment:
            continue
    least = math.inf
    for estimate, choice, small, child in sorted(children, key=lambda entry: entry[:2]):
        target = min(best.cost, cutoff)
        if estimate < target:
            try:
                found = constrained(child, limit, cutoff=target, depth=depth)
            except Infeasible:
                continue
            estimate, choices = found.bound, small.restore(found.choices)
            choices[hub] = choice
            best = min(best, _point(graph, choices), key=lambda point: point.cost)
        least = min(least, estimate)
    return best, max(bound, min(best.cost, cutoff, least))


def least_memory(graph: CostGraph, *, max_entries: int = MAX_ENTRIES) -> list[int]:
    """An assignment of finite cost and of the least memory of all of these (any, if the graph has no memory tables)."""
    allowed = shared_map(lambda table: np.where(np.isinf(table), math.inf, 0.0))
    edges = {edge: allowed(table) for edge, table in graph.edges.items()}
    zero = shared_map(np.zeros_like)
    weights = graph.memory if graph.memory is not None else tuple(zero(table) for table in graph.unary)
    joined: dict[tuple[int, int], Table] = {}
    unary = [joined.setdefault((id(u), id(m)), allowed(u) + m) for u, m in zip(graph.unary, weights, strict=True)]
    binding = {edge: table for edge, table in edges.items() if table.any()}
    small, solver = prepare(CostGraph(sizes=graph.sizes, unary=tuple(unary), edges=binding), max_entries=max_entries)
    return small.restore(solver.minimise().choices)


def _point(graph: CostGraph, choices: list[int]) -> _Point:
    return _Point(choices=choices, cost=graph.cost(choices), memory=graph.memory_of(choices))


def _maximise(
    solver: Minimiser, limit: float, free: Minimum, over: _Point, within: _Point, close: float, report: Report
) -> tuple[_Dual, _Point]:
    """The price of the greatest bound, by crossing lines, and the best assignment met; until their gap is at most `close`."""
    graph = solver.graph
    order = arrangement(graph)
    dual = _Dual(price=0.0, minimum=free, bound=free.bound, over=over, within=within)
    best, price = within, FIRST_PRICE * abs(over.cost) / over.memory
    for _ in range(MAX_PRICES):
        crossing = (dual.within.cost - dual.over.cost) / (dual.over.memory - dual.within.memory)
        price = min(price, crossing)
        if not 0.0 < price < math.inf:
            break
        minimum = solver.minimise(price, dual.minimum)
        found = _point(graph, minimum.choices)
        bound = minimum.bound - price * limit
        if bound > dual.bound:
            dual = replace(dual, price=price, minimum=minimum, bound=bound)
        line = dual.over.cost + price * dual.over.memory
        last = price == crossing and found.cost + price * found.memory >= line - max(TOLERANCE, close / 8) * abs(line)
        price = math.inf if found.memory <= limit or price == crossing else STRIDE * price
        dual = replace(dual, within=found) if found.memory <= limit else replace(dual, over=found)
        best = min(best, dual.within, _mixture(graph, dual, limit, order), key=lambda point: point.cost)
        report(best.choices, dual.bound, dual.price)
        if last or best.cost - dual.bound <= close * abs(best.cost):
            break
    return dual, best


def _mixture(graph: CostGraph, dual: _Dual, limit: float, order: Sequence[int]) -> _Point:
    """The best mixture of the two sides within the limit, in either order of the variables."""
    found = dual.within
    for first, second in ((dual.over.choices, dual.within.choices), (dual.within.choices, dual.over.choices)):
        mixed = best_cut(graph, first, second, limit, order)
        if mixed is not None:
            found = min(found, _point(graph, mixed), key=lambda point: point.cost)
    return found
