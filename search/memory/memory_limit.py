"""The memory limit: a price on bytes gives a lower bound, and two methods narrow the gap.

    min { cost(x) : memory(x) <= limit }  >=  max over p >= 0 of  L(p) - p * limit

L and the best price are those of lagrangian.py. At that price, choices whose marginal reaches the
best known cost are ruled out (elimination/filtering.py), and the search starts again on the smaller
graph. It is done at a gap of `CLOSE`, or when no choice is ruled out; if its gap is still wide, the
variables that decide most bytes are halved (halving.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..costgraph import CostGraph, Infeasible, NoAssignment, memory_tables
from ..elimination.conditioning import Minimiser, prepare
from ..elimination.derived_graphs import restrict
from ..elimination.filtering import marginals, survivors
from .halving import halve
from .lagrangian import Dual, Report, dual_of, unheard
from .lines import Point, point

CLOSE = 1e-3
"""The relative gap at which the search is done."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The best assignment found, and a bound.

    The messages at `price` prove the bound up to `proven`, smaller graphs the rest.
    """

    choices: list[int]
    bound: float
    price: float
    proven: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """A graph's solver with a memory limit in bytes.

    `cutoff`: a known cost; only cheaper assignments count, so the bound ends there.
    """

    solver: Minimiser
    limit: float
    cutoff: float
    report: Report

    def target(self, best: Point) -> float:
        """Return the cost that an assignment has to beat."""
        return min(best.cost, self.cutoff)


def constrained(
    solver: Minimiser, limit: float, *, cutoff: float = math.inf, report: Report = unheard
) -> Outcome:
    """Return the best assignment found within `limit`, and a lower bound of all within it.

    `cutoff`: a known cost; the bound ends there, as only cheaper assignments count.
    """
    graph = solver.graph
    memory_tables(graph)
    problem = _Problem(solver=solver, limit=limit, cutoff=cutoff, report=report)
    dual, best, bound = dual_of(solver, limit, close=CLOSE, report=report)
    if dual is None:
        return Outcome(choices=best.choices, bound=bound, price=0.0, proven=bound)
    # A cost of 0 is no division by 0.
    gap = (problem.target(best) - dual.bound) / max(abs(problem.target(best)), 1e-300)
    # A wide gap is worth a longer filter, as a smaller graph is searched anew.
    volume = FILTERED_VOLUME * (1 if gap <= WIDE_GAP else WORTH)
    if gap > _enough(graph) and solver.plan.volume <= volume:
        outcome = _filtered(problem, dual, best)
        if outcome is not None:
            return outcome
    # Every node of the halving takes a dual of its own, which a narrow gap is not worth.
    if gap > WIDE_GAP:
        best, bound = halve(solver, limit, dual, best, cutoff, report)
    return Outcome(choices=best.choices, bound=bound, price=dual.price, proven=dual.bound)


def _enough(graph: CostGraph) -> float:
    """Return the relative gap below which a graph is not filtered."""
    # Many equal layers mix thrifty and lavish choices, so that their gap is small as it is.
    return CLOSE if len(graph.sizes) <= MANY else WIDE_GAP


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
            inner = constrained(child, problem.limit, cutoff=target, report=report)
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
