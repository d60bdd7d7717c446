"""From a bound to the optimum on too wide graphs: rule out choices and raise the bound, in turns.

    surviving_v  =  { c : marginal_v[c] < cost of the incumbent }
    share_i     <-  share_i - step * (marginal_i - mean over the copies of marginal)

- Marginals that reach the best cost rule out choices: tables become smaller, fewer variables are
  split, and in the end the elimination is exact.
- If they rule out few, the split variables' unary tables move between their copies, which raises
  the bound.

The marginals and their sources are those of elimination/filtering.py. The step of a move grows
while the bound rises and is halved when it falls (N. Z. Shor's rule of thumb for supergradients,
Minimization Methods for Non-Differentiable Functions, 1985).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from ..costgraph import NoAssignment
from ..elimination.conditioning import PRUNE_WORK, Minimiser, Minimum
from ..elimination.filtering import marginals, survivors
from ..elimination.order_choice import MAX_ENTRIES, typical_schedule
from ..elimination.pruning import Reduction, reduce
from ..tables import Indices, Table
from .interruption import Incumbent

PASSES = 64
"""The largest number of passes."""
WORK = 1e10
"""The most additions of all passes."""
PASS = 4
"""Additions of a pass for each entry of its cliques."""
FIRST_STEP = 0.5
GROWTH = 1.1
"""The step of the first move, and its growth while the bound rises."""
FEWER = 0.8
"""The tables are cut if at most this share of the choices is left."""
PATIENCE = 4
PROGRESS = 0.15
"""The passes end if the last `PATIENCE` ones closed less than this share of the gap."""
IMPROVED = 4
"""The assignment is improved once in this many passes, because that takes as long as a pass."""
CLOSED = 1e-9
"""A relative gap of rounding alone."""


def narrow(
    known: Incumbent,
    small: Reduction,
    solver: Minimiser,
    minimum: Minimum,
    *,
    close: float = CLOSED,
    work: float = WORK,
) -> Reduction | None:
    """Return the graph without the choices ruled out, or None if it was solved.

    It is solved by the optimum, or by a gap of `close`. `known` gets better assignments and bounds.
    `solver`, `minimum`: the relaxation of `small`, and its minimum. `work`: additions of all
    passes, which end where they exceed it.
    """
    # The bounds of a narrowed graph hold only for what is cheaper than the incumbent, so no message
    # of it is a proof for the whole graph.
    proof = replace(known.proof, kind="enumeration")
    step = FIRST_STEP
    spent = 0.0
    bounds = [minimum.bound]
    merged = sum(small.graph.sizes)
    while len(bounds) <= PASSES and spent <= work:
        spent += PASS * solver.plan.work
        total = sum(solver.graph.sizes)
        least = marginals(solver.plan, minimum.tables)
        surviving = survivors(solver, least, known.cost)
        if surviving is None:
            known.prove(known.cost, proof)
            return None
        left = sum(map(len, surviving))
        if left <= FEWER * total:
            small, solver = _without(small, solver, surviving, least, step)
            # Half of the choices are gone, so that some split variables may become one again.
            if not solver.exact and left <= merged / 2:
                solver.merge()
                merged = left
        else:
            solver.tighten(least, step)
        try:
            minimum = solver.minimise(improve=len(bounds) % IMPROVED == 0)
        except NoAssignment:
            # Every cheaper assignment is forbidden, so the known one is the optimum.
            known.prove(known.cost, proof)
            return None
        known.offer(small.restore(minimum.choices))
        known.prove(min(known.cost, minimum.bound), proof)
        if solver.exact or known.gap <= close:
            return None
        step = step * GROWTH if minimum.bound >= bounds[-1] else step / 2
        bounds.append(minimum.bound)
        # Single passes may lower the bound while the step is still too long, so several are judged.
        before = max(bounds[:-PATIENCE], default=-math.inf)
        if max(bounds) - before < PROGRESS * (known.cost - before):
            break
    return small


def _without(
    small: Reduction,
    solver: Minimiser,
    surviving: Sequence[Indices],
    least: Sequence[Table],
    step: float,
) -> tuple[Reduction, Minimiser]:
    """Return the graph of only these choices, and its solver.

    The solver is exact if that is quick, else it has the same variables split, whose unary tables
    then move by `step`.
    """
    cut = solver.without(surviving)
    rest = reduce(cut.graph, prune=False, memory=False)
    plan = typical_schedule(rest.graph)
    chosen = tuple(old[now] for old, now in zip(small.surviving, surviving, strict=True))
    if plan.widest <= MAX_ENTRIES and plan.work <= PRUNE_WORK:
        folded = replace(
            small,
            graph=rest.graph,
            surviving=tuple(old[now] for old, now in zip(chosen, rest.surviving, strict=True)),
        )
        return folded, Minimiser(rest.graph, max_entries=MAX_ENTRIES, plan=plan)
    cut.tighten(
        [table[surviving[origin]] for origin, table in zip(cut.origins, least, strict=True)], step
    )
    return replace(small, graph=cut.graph, surviving=chosen), cut
