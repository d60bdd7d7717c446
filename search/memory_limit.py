"""The memory limit: a price on bytes gives a lower bound; filters, halves, mixtures and labels close the gap.

    min { cost(x) : memory(x) <= limit }  >=  max over p >= 0 of  L(p) - p * limit        lagrangian.py

At the best price, choices whose marginal reaches the best known cost are ruled out (filtering.py), and the search
starts again on the smaller graph. A large graph is done at a gap of `CLOSE`, or when no choice is ruled out; if its
gap is still wide, the variables that decide most bytes are halved (halving.py). The gap of a small graph is closed
(labels.py, branching).
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
from .lagrangian import TOLERANCE, Dual, Report, dual_of, unheard
from .lines import Point, point
from .local_search import descend

CLOSE = 1e-3
"""The relative gap at which a large graph is done."""
EXACT_CHOICES = 2048
"""The most choices, over all variables, of a small graph, whose gap is closed."""
GOOD_ENOUGH = 1e-5
"""The relative gap below which no variable is branched on."""
FEWER = 0.9
"""The search starts again if a filter leaves at most this share of the choices."""
MANY, WIDE_GAP = 1000, 1e-2
"""A graph of more variables than `MANY` is filtered only above a relative gap of `WIDE_GAP`.

Filtering it takes a second, and graphs of many equal layers have small gaps.
"""
FILTERED_VOLUME = 1e8
WORTH = 8
"""The most entries of all cliques (equal ones count each time) for filtering: half a second.

`WORTH` times as many if the gap is wide.
"""
HUB_DEGREE = 8
"""The fewest edges of a hub, a variable to branch on."""
BRANCH_DEPTH = 2
"""The largest number of nested branches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The best assignment found, and a bound; the messages at `price` prove it up to `proven`, enumeration the rest."""

    choices: list[int]
    bound: float
    price: float
    proven: float


def constrained(
    solver: Minimiser, limit: float, *, cutoff: float = math.inf, depth: int = BRANCH_DEPTH, report: Report = unheard
) -> Outcome:
    """The best assignment found within `limit`, and a lower bound of all assignments within it.

    `cutoff`: a known cost; the bound ends there, as only cheaper assignments count. `depth`: nested branches left.
    """
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
    # The label search needs exact tables: its excess is measured from the true optimum at the price.
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
        better, excluded = label_search(graph, solver.plan, dual.tables, price=dual.price, limit=limit, gap=gap, room=room)
        if better is not None and graph.cost(better) < best.cost:
            best = point(graph, descend(graph, better, limit=limit))
        bound = max(bound, min(best.cost, cutoff, excluded))
    return Outcome(choices=best.choices, bound=bound, price=dual.price, proven=dual.bound)


def _filtered(solver: Minimiser, limit: float, dual: Dual, best: Point, target: float, depth: int, report: Report) -> Outcome | None:
    """`constrained` on the graph without the choices that cost at least `target`; None if these are too few."""
    graph = solver.graph
    kept = survivors(solver, marginals(solver.plan, dual.tables), target + dual.price * limit)
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
    """The variable of most edges on which the two sides differ, if it has at least `HUB_DEGREE`."""
    degree = Counter(v for edge in graph.edges for v in edge)
    differing = [v for v in degree if degree[v] >= HUB_DEGREE and dual.over.choices[v] != dual.within.choices[v]]
    return max(differing, key=lambda v: (degree[v], -v), default=None)


def _branch(
    solver: Minimiser, limit: float, hub: int, dual: Dual, best: Point, bound: float, cutoff: float, depth: int
) -> tuple[Point, float]:
    """Solve the graph for each choice of the hub, the one of the least bound first.

    With the hub fixed, mixtures of layers cost nearly nothing.
    """
    graph = solver.graph
    # The bound at the dual's price orders the children; most are then ruled out by the best cost.
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
