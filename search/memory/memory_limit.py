"""The memory limit: a price on bytes gives a lower bound, and four methods close the gap.

    min { cost(x) : memory(x) <= limit }  >=  max over p >= 0 of  L(p) - p * limit

L and the best price are those of lagrangian.py. At that price, choices whose marginal reaches the
best known cost are ruled out (elimination/filtering.py), and the search starts again on the smaller
graph. A large graph is done at a gap of `CLOSE`, or when no choice is ruled out; if its gap is
still wide, the variables that decide most bytes are halved (halving.py). The gap of a small graph
is closed (labels.py, branching).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..costgraph import CostGraph, Infeasible, NoAssignment, memory_tables
from ..elimination.conditioning import Minimiser, prepare
from ..elimination.derived_graphs import condition, restrict
from ..elimination.filtering import marginals, survivors
from ..elimination.local_search import descend
from .halving import halve
from .labels import ROOMS, Priced, label_search
from .lagrangian import TOLERANCE, Dual, Report, dual_of, unheard
from .lines import Point, point

CLOSE = 1e-3
"""The relative gap at which a large graph is done."""
EXACT_CHOICES = 2048
"""The most choices, over all variables, of a small graph, whose gap is closed."""
GOOD_ENOUGH = 1e-5
"""The relative gap below which no variable is branched on."""
FEWER = 0.9
"""The search starts again if a filter leaves at most this share of the choices."""
MANY = 1000
"""Variables above which a graph is filtered only if its gap is wide.

Filtering it takes a second, and graphs of many equal layers have small gaps.
"""
WIDE_GAP = 1e-2
"""A relative gap above this one is wide."""
FILTERED_VOLUME = 1e8
"""The most entries of all cliques (equal ones count each time) for filtering: half a second."""
WORTH = 8
"""Factor on `FILTERED_VOLUME` if the gap is wide."""
HUB_DEGREE = 8
"""The fewest edges of a hub, a variable to branch on."""
BRANCH_DEPTH = 2
"""The largest number of nested branches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The best assignment found, and a bound.

    The messages at `price` prove the bound up to `proven`, enumeration the rest.
    """

    choices: list[int]
    bound: float
    price: float
    proven: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """A graph's solver with a memory limit in bytes.

    `cutoff`: a known cost; only cheaper assignments count, so the bound ends there. `depth`: nested
    branches left.
    """

    solver: Minimiser
    limit: float
    cutoff: float
    depth: int
    report: Report

    def target(self, best: Point) -> float:
        """Return the cost that an assignment has to beat."""
        return min(best.cost, self.cutoff)


def constrained(
    solver: Minimiser,
    limit: float,
    *,
    cutoff: float = math.inf,
    depth: int = BRANCH_DEPTH,
    report: Report = unheard,
) -> Outcome:
    """Return the best assignment found within `limit`, and a lower bound of all within it.

    `cutoff`: a known cost; the bound ends there, as only cheaper assignments count. `depth`: nested
    branches left.
    """
    graph = solver.graph
    memory_tables(graph)
    problem = _Problem(solver=solver, limit=limit, cutoff=cutoff, depth=depth, report=report)
    small = sum(graph.sizes) <= EXACT_CHOICES
    # A small graph's gap is closed in any case, and the best price makes that shorter.
    dual, best, bound = dual_of(solver, limit, close=0.0 if small else CLOSE, report=report)
    if dual is None:
        return Outcome(choices=best.choices, bound=bound, price=0.0, proven=bound)
    # A cost of 0 is no division by 0.
    gap = (problem.target(best) - dual.bound) / max(abs(problem.target(best)), 1e-300)
    volume = FILTERED_VOLUME * (1 if gap <= WIDE_GAP else WORTH)
    if gap > _enough(graph) and solver.plan.volume <= volume:
        outcome = _filtered(problem, dual, best)
        if outcome is not None:
            return outcome
    if gap > WIDE_GAP and not small:
        best, bound = halve(solver, limit, dual, best, cutoff, report)
    # The label search needs exact tables: its excess is measured from the true optimum at the
    # price.
    if solver.exact and small:
        best, bound = _close_gap(problem, dual, best, bound)
    return Outcome(choices=best.choices, bound=bound, price=dual.price, proven=dual.bound)


def _enough(graph: CostGraph) -> float:
    """Return the relative gap below which a graph is not filtered."""
    if sum(graph.sizes) <= EXACT_CHOICES:
        return TOLERANCE
    return CLOSE if len(graph.sizes) <= MANY else WIDE_GAP


def _close_gap(problem: _Problem, dual: Dual, best: Point, bound: float) -> tuple[Point, float]:
    """Search with labels, first in little room and then in more, or by branches on a hub."""
    solver = problem.solver
    graph = solver.graph
    priced = Priced(plan=solver.plan, tables=dual.tables, price=dual.price)
    for number, room in enumerate(ROOMS):
        target = problem.target(best)
        if target - bound <= TOLERANCE * abs(target):
            break
        # The first pass over the labels is cheap and often closes the gap. A branch solves the
        # graph once for each choice of the hub, so it comes only after that pass.
        hub = _hub(graph, dual)
        problem.report(best.choices, dual.bound, dual.price)
        wide = target - bound > GOOD_ENOUGH * abs(target)
        if number and problem.depth and hub is not None and wide:
            return _branch(problem, hub, dual, best, bound)
        better, excluded = label_search(
            graph, priced, limit=problem.limit, gap=target - dual.bound, room=room
        )
        if better is not None and graph.cost(better) < best.cost:
            best = point(graph, descend(graph, better, limit=problem.limit))
        bound = max(bound, min(problem.target(best), excluded))
    return best, bound


def _filtered(problem: _Problem, dual: Dual, best: Point) -> Outcome | None:
    """Solve again without the choices that cost too much; None if these are too few.

    Choices cost too much if no assignment with them beats the target.
    """
    solver = problem.solver
    graph = solver.graph
    target = problem.target(best)
    least = marginals(solver.plan, dual.tables)
    # Marginals are of cost + price * memory. An assignment within the limit that is cheaper than
    # the target has less of it than target + price * limit, and so have the marginals of its
    # choices.
    surviving = survivors(solver, least, target + dual.price * problem.limit)
    bound = target
    if surviving is not None:
        if sum(map(len, surviving)) > FEWER * sum(graph.sizes):
            return None
        small, child = prepare(restrict(graph, surviving), max_entries=solver.max_entries)

        def restored(choices: Sequence[int]) -> list[int]:
            return [
                int(indices[choice])
                for indices, choice in zip(surviving, small.restore(choices), strict=True)
            ]

        def report(choices: list[int], bound: float, price: float) -> None:
            # The bound of the smaller graph holds for it alone; that of the dual holds for all.
            problem.report(restored(choices), dual.bound, dual.price)

        try:
            inner = constrained(
                child, problem.limit, cutoff=target, depth=problem.depth, report=report
            )
        except (Infeasible, NoAssignment):
            # An answer, not a failure. `surviving` holds every assignment within the limit that
            # costs less than the target; if none of these fits, or all are forbidden, the target is
            # the bound. `best` fits the limit of the whole graph, whose least memory `dual_of` has
            # checked.
            pass
        else:
            candidate = point(graph, restored(inner.choices))
            best = min(best, candidate, key=lambda each: each.cost)
            bound = min(target, inner.bound)
    return Outcome(
        choices=best.choices, bound=max(bound, dual.bound), price=dual.price, proven=dual.bound
    )


def _hub(graph: CostGraph, dual: Dual) -> int | None:
    """The variable of most edges on which the two sides differ, if it has at least `HUB_DEGREE`."""
    degree = Counter(v for edge in graph.edges for v in edge)
    differing = [
        v
        for v in degree
        if degree[v] >= HUB_DEGREE and dual.over.choices[v] != dual.within.choices[v]
    ]
    return max(differing, key=lambda v: (degree[v], -v), default=None)


def _branch(
    problem: _Problem, hub: int, dual: Dual, best: Point, bound: float
) -> tuple[Point, float]:
    """Solve the graph for each choice of the hub, the one of the least bound first.

    With the hub fixed, mixtures of layers cost nearly nothing.
    """
    solver = problem.solver
    graph = solver.graph
    # The bound at the dual's price orders the children; most are then ruled out by the best cost.
    children = []
    for choice in range(graph.sizes[hub]):
        try:
            small, child = prepare(condition(graph, {hub: choice}), max_entries=solver.max_entries)
            children.append(
                (
                    child.minimise(dual.price).bound - dual.price * problem.limit,
                    choice,
                    small,
                    child,
                )
            )
        except NoAssignment:
            continue  # every assignment with this choice is forbidden, so it needs no bound
    least = math.inf
    for estimate, choice, small, child in sorted(children, key=lambda entry: entry[:2]):
        target = problem.target(best)
        if estimate < target:
            try:
                inner = constrained(child, problem.limit, cutoff=target, depth=problem.depth - 1)
            except Infeasible:
                continue  # nothing with this choice fits, so it does not lower the bound
            estimate = inner.bound
            choices = small.restore(inner.choices)
            choices[hub] = choice
            best = min(best, point(graph, choices), key=lambda each: each.cost)
        least = min(least, estimate)
    return best, max(bound, min(problem.target(best), least))
