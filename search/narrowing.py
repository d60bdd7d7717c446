"""From a bound to the optimum on graphs too wide for exact tables: rule choices out, and raise the bound, in turns.

    gap -> choices whose marginal reaches the best cost go  -> smaller tables, fewer split variables, exact in the end
    no choice goes -> the split variables' unary tables move between their copies -> a higher bound

The step of a move grows while the bound rises and is halved when it falls (N. Z. Shor's rule of thumb for supergradients).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from .conditioning import PRUNE_WORK, Minimiser, Minimum
from .costgraph import Indices, NoAssignment, Table
from .elimination import MAX_ENTRIES, typical_schedule
from .filtering import marginals, survivors
from .interruption import Incumbent
from .pruning import Reduction, reduce

PASSES = 64
WORK = 1e10
"""Additions of passes over one width; a pass makes some four for each entry of its cliques."""
FIRST_STEP, GROWTH = 0.5, 1.1
FEWER = 0.8
"""Share of the choices that must be left at most for the tables to be cut."""
PATIENCE, PROGRESS = 4, 0.15
"""So many passes must close that share of the gap to be followed by another."""
IMPROVED = 4
"""In every so many passes the assignment is improved, which takes as long as the pass."""
CLOSED = 1e-9
"""Relative gap that is none but for rounding."""


def narrow(known: Incumbent, small: Reduction, solver: Minimiser, minimum: Minimum) -> Reduction | None:
    """Tell `known` of better assignments and bounds; what is left of the graph, or None when the optimum was found."""
    proof, step, spent = replace(known.proof, kind="enumeration"), FIRST_STEP, 0.0
    bounds, merged = [minimum.bound], sum(small.graph.sizes)
    while len(bounds) <= PASSES and spent <= WORK:
        spent += 4 * solver.plan.work
        total = sum(solver.graph.sizes)
        least = marginals(solver.plan, minimum.tables)
        kept = survivors(solver, least, known.cost)
        if kept is None:
            known.prove(known.cost, proof)
            return None
        left = sum(map(len, kept))
        if left <= FEWER * total:
            small, solver = _without(small, solver, kept, least, step)
            if not solver.exact and left <= merged / 2:
                solver.merge()
                merged = left
        else:
            solver.tighten(least, step)
        try:
            minimum = solver.minimise(improve=len(bounds) % IMPROVED == 0)
        except NoAssignment:
            # What is left forbids itself, so that nothing is below what is known.
            known.prove(known.cost, proof)
            return None
        known.offer(small.restore(minimum.choices))
        known.prove(min(known.cost, minimum.bound), proof)
        if solver.exact or known.gap <= CLOSED:
            return None
        step = step * GROWTH if minimum.bound >= bounds[-1] else step / 2
        bounds.append(minimum.bound)
        before = max(bounds[:-PATIENCE], default=-math.inf)
        if max(bounds) - before < PROGRESS * (known.cost - before):
            break
    return small


def _without(
    small: Reduction, solver: Minimiser, kept: Sequence[Indices], least: Sequence[Table], step: float
) -> tuple[Reduction, Minimiser]:
    """The graph of only these choices: exact if that is quick, or else with the same split variables, a step on."""
    cut = solver.without(kept)
    rest = reduce(cut.graph, prune=False, memory=False)
    plan = typical_schedule(rest.graph)
    chosen = tuple(old[now] for old, now in zip(small.kept, kept, strict=True))
    if plan.widest <= MAX_ENTRIES and plan.work <= PRUNE_WORK:
        folded = replace(small, graph=rest.graph, kept=tuple(old[now] for old, now in zip(chosen, rest.kept, strict=True)))
        return folded, Minimiser(rest.graph, max_entries=MAX_ENTRIES, plan=plan)
    cut.tighten([table[kept[origin]] for origin, table in zip(cut.origins, least, strict=True)], step)
    return replace(small, graph=cut.graph, kept=chosen), cut
