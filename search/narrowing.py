"""From a bound to the optimum on graphs too wide for exact tables: rule choices out, and raise the bound, in turns.

    gap -> choices whose marginal reaches the best cost go  -> smaller tables, fewer split variables, exact in the end
    no choice goes -> the split variables' unary tables move between their copies -> a higher bound

The step of a move grows while the bound rises and is halved when it falls (N. Z. Shor's rule of thumb for supergradients).
"""

from collections.abc import Sequence
from dataclasses import replace

from .conditioning import PRUNE_WORK, Minimiser, Minimum
from .costgraph import Indices
from .elimination import MAX_ENTRIES, typical_schedule
from .filtering import marginals, survivors
from .interruption import Incumbent
from .pruning import Reduction, reduce

PASSES = 24
FIRST_STEP, GROWTH = 0.5, 1.1
FEWER = 0.8
"""Share of the choices that must be left at most for the graph to be set up anew."""
PROGRESS = 0.05
"""Share of the gap that a pass must close to be followed by another."""
CLOSED = 1e-9
"""Relative gap that is none but for rounding."""


def narrow(known: Incumbent, small: Reduction, solver: Minimiser, minimum: Minimum) -> bool:
    """Tell `known` of better assignments and bounds; whether the optimum was found."""
    step, proof, bound = FIRST_STEP, replace(known.proof, kind="enumeration"), minimum.bound
    for _ in range(PASSES):
        total = sum(solver.graph.sizes)
        least = marginals(solver.plan, minimum.tables)
        kept = survivors(solver, least, known.cost)
        if kept is None:
            known.prove(known.cost, proof)
            return True
        left = sum(map(len, kept))
        if left <= FEWER * total:
            small, solver = _without(small, solver, kept)
        else:
            solver.tighten(least, step)
        minimum = solver.minimise()
        known.offer(small.restore(minimum.choices))
        gap = known.cost - bound
        known.prove(min(known.cost, minimum.bound), proof)
        if solver.exact or known.gap <= CLOSED:
            return True
        if left > FEWER * total and minimum.bound - bound < PROGRESS * gap and step < FIRST_STEP:
            return False
        step = step * GROWTH if minimum.bound >= bound else step / 2
        bound = minimum.bound
    return False


def _without(small: Reduction, solver: Minimiser, kept: Sequence[Indices]) -> tuple[Reduction, Minimiser]:
    """The graph of only these choices: exact if that is quick, else with fewer split variables, or else with the same ones."""
    cut = solver.without(kept)
    rest = reduce(cut.graph, prune=False, memory=False)
    plan = typical_schedule(rest.graph)
    chosen = tuple(old[now] for old, now in zip(small.kept, kept, strict=True))
    folded = replace(small, graph=rest.graph, kept=tuple(old[now] for old, now in zip(chosen, rest.kept, strict=True)))
    if plan.widest <= MAX_ENTRIES and plan.work <= PRUNE_WORK:
        return folded, Minimiser(rest.graph, max_entries=MAX_ENTRIES, plan=plan)
    fresh = Minimiser(rest.graph, max_entries=solver.max_entries)
    if len(fresh.fixed) < len(solver.fixed):
        return folded, fresh
    return replace(small, graph=cut.graph, kept=chosen), cut
