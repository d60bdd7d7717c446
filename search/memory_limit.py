"""The memory limit: a price on bytes bounds the optimum from below; filters, halves, mixtures and labelled search close the gap.

    min { cost(x) : memory(x) <= limit }  >=  max over p >= 0 of  L(p) - p * limit                                   lagrangian.py

At the best price, choices whose marginal reaches the best known cost go (filtering.py), and the same begins on what is left. A large
graph is done when its gap is at most `CLOSE`, or when nothing narrows it; while it is wide, the variable that decides most bytes is halved
(halving.py). The gap of a small one is closed (labels.py, branching).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .conditioning import Minimiser, condition, prepare, restrict
from .costgraph import CostGraph, Infeasible, NoAssignment, memory_tables
from .filtering import marginals, survivors
from .halving import halve
from .labels import ROOMS, label_search
from .lagrangian import TOLERANCE, Dual, Point, Report, dual_of, point, unheard
from .local_search import descend

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
class Outcome:
    """The best assignment found, and a bound; the messages at `price` prove `proven` of it, enumeration the rest."""

    choices: list[int]
    bound: float
    price: float
    proven: float


def constrained(
    solver: Minimiser, limit: float, *, cutoff: float = math.inf, depth: int = BRANCH_DEPTH, report: Report = unheard
) -> Outcome:
    """The best assignment found within `limit`, and a bound that no assignment within it undercuts (or that reaches `cutoff`)."""
    graph = solver.graph
    memory_tables(graph)
    small = sum(graph.sizes) <= EXACT_CHOICES
    dual, best, bound = dual_of(solver, limit, close=0.0 if small else CLOSE, report=report)
    if dual is None:
        return Outcome(choices=best.choices, bound=bound, price=0.0, proven=bound)
    target = min(best.cost, cutoff)
    enough = TOLERANCE if small else CLOSE if len(graph.sizes) <= MANY else WIDE_GAP
    gap = (target - dual.bound) / max(abs(target), 1e-300)
    if gap > enough and solver.plan.volume <= FILTERED_VOLUME * (1 if gap <= WIDE_GAP else WORTH):
        rest = _filtered(solver, limit, dual, best, target, depth, report)
        if rest is not None:
            return rest
    if gap > WIDE_GAP and not small:
        best, bound = halve(solver, limit, dual, best, cutoff, report)
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
            best = point(graph, descend(graph, better, limit=limit))
        bound = max(bound, min(best.cost, cutoff, excluded))
    return Outcome(choices=best.choices, bound=bound, price=dual.price, proven=dual.bound)


def _filtered(solver: Minimiser, limit: float, dual: Dual, best: Point, target: float, depth: int, report: Report) -> Outcome | None:
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
            best = min(best, point(graph, restored(found.choices)), key=lambda found: found.cost)
            bound = min(target, found.bound)
        except (Infeasible, NoAssignment):
            pass  # nothing below the target was left
    return Outcome(choices=best.choices, bound=max(bound, dual.bound), price=dual.price, proven=dual.bound)


def _hub(graph: CostGraph, dual: Dual) -> int | None:
    """The variable of most edges among those on which the two sides differ, if it has many."""
    degree = Counter(v for edge in graph.edges for v in edge)
    differing = [v for v in degree if degree[v] >= HUB_DEGREE and dual.over.choices[v] != dual.within.choices[v]]
    return max(differing, key=lambda v: (degree[v], -v), default=None)


def _branch(
    solver: Minimiser, limit: float, hub: int, dual: Dual, best: Point, bound: float, cutoff: float, depth: int
) -> tuple[Point, float]:
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
            best = min(best, point(graph, choices), key=lambda found: found.cost)
        least = min(least, estimate)
    return best, max(bound, min(best.cost, cutoff, least))
