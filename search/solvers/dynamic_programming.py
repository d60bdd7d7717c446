"""The exact search: prune, then eliminate variable by variable.

    best(graph) = min over x of cost(x)   subject to   memory(x) <= limit

elimination/orders.py finds the order and elimination/join.py joins the tables;
memory/memory_limit.py prices the bytes, and memory/mixtures.py narrows the gap that is left.

If exact tables would be too wide or take too long, narrow ones come first
(elimination/conditioning.py): they mostly find the same assignment in a hundredth of the time, and
the gap of the solution shows whether wider tables are worth their work. Within a limit the graph is
solved once, with the widest tables that do not take too long.

Sources: U. Bertele and F. Brioschi, Nonserial Dynamic Programming (1972); H. Everett III,
Generalized Lagrange Multiplier Method (1963).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..costgraph import CostGraph, Infeasible, NoAssignment, Proof, Solution
from ..elimination.conditioning import Minimiser, Minimum, shrink
from ..elimination.derived_graphs import soften
from ..elimination.local_search import descend
from ..elimination.order_choice import MAX_ENTRIES, typical_schedule
from ..elimination.pruning import Reduction, reduce
from ..memory.memory_limit import constrained
from .interruption import Incumbent, Interrupted
from .narrowing import PASS, WORK, narrow
from .recursive_programming import recursive_programming

METHOD = "dynamic_programming"
NARROW = (1 << 16, 1 << 18, 1 << 21)
"""The largest entries of a table that are tried, in this order, if exact tables are too wide or
take too long.
"""
EXACT_WORK = 2e9
"""Additions (a few seconds) above which narrower tables come first, and wider ones only while
nothing is found.
"""
NEARLY_WORK = 2e8
"""Additions of a pass above which a gap of `PASSABLE` is good enough, unless the optimum is asked
for.
"""
PASSABLE = 2e-2
"""The relative gap that is good enough on graphs too large for a smaller one."""
LIGHT_WORK = 1e9
"""Additions of a relaxation up to which it takes less time than pruning saves."""
HOPEFUL = 1e-2
"""The largest gap of the first assignment at which its cost rules out choices before a better one
is searched.
"""
ROUNDING = 1e-9
"""Relative distance of bounds that are equal but for rounding."""


def dynamic_programming(graph: CostGraph, *, memory_limit: float | None = None) -> Solution:
    """Return the optimum, or a solution with a certified gap.

    There is a gap where the graph is too wide, or large with a tight memory limit. A
    KeyboardInterrupt becomes `Interrupted`, with the best solution so far.
    """
    return eliminate_variables(graph, memory_limit=memory_limit, max_entries=MAX_ENTRIES)


def nearly(
    graph: CostGraph,
    *,
    close: float,
    enough: float = math.inf,
    room: float = math.inf,
    loose: float = 0.0,
) -> Solution:
    """Return a solution without a memory limit that is near enough to the optimum.

    Its gap is at most `close`, or its bound is `enough`; it is the optimum where that takes no
    longer. A solution that takes more bytes than `room` need only be as near as `loose`. On graphs
    that are too wide and too large for that, it is the first solution whose gap is `PASSABLE`.
    """
    aim = Aim(close=close, enough=enough, room=room, loose=loose)
    return eliminate_variables(graph, memory_limit=None, max_entries=MAX_ENTRIES, aim=aim)


def distinct_joins(graph: CostGraph) -> int:
    """Return the number of joins that an elimination of `graph` computes.

    Equal layers share theirs.
    """
    return len(typical_schedule(reduce(graph, prune=False, memory=False).graph).joins)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The gap, or the bound, at which a search ends.

    It ends at a gap of `loose`, too, with an assignment that takes more bytes than `room`.
    """

    close: float = ROUNDING
    enough: float = math.inf
    room: float = math.inf
    loose: float = 0.0

    @property
    def work(self) -> float:
        """Additions that may be spent on a smaller gap."""
        return WORK if self.close <= ROUNDING else 4 * NEARLY_WORK

    def costly(self, solver: Minimiser) -> bool:
        """Whether a single pass towards a smaller gap is more than the allowed work.

        A gap of rounding alone is worth any work.
        """
        return self.close > ROUNDING and PASS * solver.plan.volume > self.work

    def reached(self, known: Incumbent) -> bool:
        """Whether the search may end with this incumbent."""
        if known.choices is None:
            return False
        if known.gap <= self.close or known.bound >= self.enough:
            return True
        # The caller does not use an assignment that takes too much, so it need not be as near.
        return known.gap <= self.loose and known.graph.memory_of(known.choices) > self.room


def eliminate_variables(
    graph: CostGraph, *, memory_limit: float | None, max_entries: int, aim: Aim | None = None
) -> Solution:
    """Search with tables of at most `max_entries` entries, until the `aim` is reached."""
    known = Incumbent(graph, memory_limit, METHOD)
    try:
        _search(known, max_entries, aim or Aim())
        if known.choices is None:
            raise ValueError(
                "the graph is too wide to eliminate exactly, and no assignment of finite cost was "
                "found; forbid less"
            )
        return known.solution()
    except KeyboardInterrupt as interrupt:
        raise Interrupted(known.salvage()) from interrupt


def _search(known: Incumbent, max_entries: int, aim: Aim) -> None:
    # Under a limit the graph is minimised at many prices of a byte, so that pruning it first pays.
    limit = known.limit
    free = limit is None
    small, plan = shrink(known.graph, max_entries=max_entries, memory=not free, prune=not free)
    if plan is None and free:
        left = _narrowed(known, small, min(NARROW[0], max_entries), aim)
        if left is None:
            return
        small = left
    widest = Minimiser(small.graph, max_entries=max_entries, plan=plan)
    if widest.exact and widest.plan.work <= EXACT_WORK:
        _solve_exactly(known, small, widest)
        return
    # A first assignment in little time: its cost rules out choices, and near a tight limit narrow
    # tables may find none.
    _offer_fast(known)
    narrower = [width for width in NARROW if width < max_entries]
    if limit is None:
        _widen(known, small, [*narrower, max_entries], aim)
    else:
        solvers = [Minimiser(small.graph, max_entries=width) for width in narrower]
        _solve_within(known, small, [*solvers, widest], limit)


def _solve_exactly(known: Incumbent, small: Reduction, solver: Minimiser) -> None:
    """Offer the optimum of a graph that keeps all assignments cheaper than the incumbent."""
    try:
        if known.limit is None:
            _assign(known, small, solver, Aim())
        else:
            _assign_within(known, small, solver, known.limit)
    except NoAssignment:
        # Narrowing keeps all cheaper assignments; none is left, so the known one is the optimum.
        if known.choices is None:
            raise
        known.prove(known.cost, replace(known.proof, kind="enumeration"))


def _widen(known: Incumbent, small: Reduction, widths: Sequence[int], aim: Aim) -> None:
    """Solve with ever wider tables, and narrow the graph between, until the aim is reached."""
    proven = False
    work = 0.0
    for width in widths:
        solver = Minimiser(small.graph, max_entries=width)
        # A wider limit is skipped if it changes no table, takes too long, or has no gap to close.
        useless = solver.plan.work == work or solver.plan.work > EXACT_WORK
        if proven and (useless or aim.reached(known)):
            continue
        work = solver.plan.work
        minimum = _assign(known, small, solver, aim)
        proven = known.choices is not None
        if aim.reached(known) or aim.costly(solver):
            continue
        left = narrow(known, small, solver, minimum, close=aim.close, work=aim.work)
        if left is None:
            return
        small = left


def _solve_within(
    known: Incumbent, small: Reduction, solvers: Sequence[Minimiser], limit: float
) -> None:
    """Solve once within the limit, with the widest tables that do not take too long.

    Wider ones follow only while these miss all assignments of so little memory.
    """
    quick = [solver for solver in solvers if solver.plan.work <= EXACT_WORK]
    slow = [solver for solver in solvers if solver.plan.work > EXACT_WORK]
    for solver in (*quick[-1:], *slow):
        try:
            _assign_within(known, small, solver, limit)
            return
        except Infeasible as error:
            missed = error
    # The fast search may know an assignment though no tables met one.
    if known.choices is None:
        raise missed


def _narrowed(known: Incumbent, whole: Reduction, width: int, aim: Aim) -> Reduction | None:
    """Return a too wide graph without the choices that its relaxation rules out, or None if solved.

    Mostly a few variables are split, such as a value that all layers of a decoder read, and what
    their copies want is so near the optimum that little else is left.
    """
    small = whole
    solver = Minimiser(whole.graph, max_entries=width)
    if solver.exact or solver.plan.work > LIGHT_WORK:
        small = reduce(known.graph, memory=False)
        solver = Minimiser(small.graph, max_entries=width)
    if solver.exact:
        return small
    minimum = solver.minimise(improve=False)
    # The cheapest way to an assignment is enough here: its cost only has to rule out choices.
    known.offer(small.restore(descend(soften(small.graph), minimum.choices)))
    known.prove(minimum.bound, _proof(known, small, solver, "messages"))
    if aim.close > ROUNDING and not aim.reached(known):
        # An assignment that is as near as can be is mostly all that is missing.
        known.offer(small.restore(solver.improve(minimum.choices)))
    if aim.reached(known):
        return None
    if aim.close > ROUNDING and solver.plan.work > NEARLY_WORK and known.gap <= PASSABLE:
        return None
    if known.gap > (PASSABLE if aim.close > ROUNDING else HOPEFUL):
        return small if small is not whole else reduce(known.graph, memory=False)
    return narrow(known, small, solver, minimum, close=aim.close)


def _offer_fast(known: Incumbent) -> None:
    """Offer the fast search's assignment, with its bound, to begin with."""
    try:
        fast = recursive_programming(known.graph, memory_limit=known.limit)
    # That the fast search finds nothing within the limit says little; that every assignment is
    # forbidden is proven, and the end of the search.
    except ValueError as error:
        if isinstance(error, NoAssignment):
            raise
        return
    known.offer(fast.choices)
    known.prove(fast.lower_bound, fast.proof)


def _assign(known: Incumbent, small: Reduction, solver: Minimiser, aim: Aim) -> Minimum:
    """Offer `known` the minimum without a limit, which is returned, and its bound."""
    proof = _proof(known, small, solver, "messages")
    minimum = solver.minimise(improve=False)
    if solver.exact:
        known.offer(small.restore(minimum.choices))
        known.prove(known.cost, proof)
        return minimum
    known.prove(minimum.bound, proof)
    # A bound that is enough needs no better assignment than is known.
    if not aim.reached(known):
        known.offer(small.restore(solver.improve(minimum.choices)))
    return minimum


def _assign_within(known: Incumbent, small: Reduction, solver: Minimiser, limit: float) -> None:
    """Offer `known` an assignment, and a bound of all assignments within the limit."""

    def report(choices: list[int], bound: float, price: float) -> None:
        known.offer(small.restore(choices))
        known.prove(bound, _proof(known, small, solver, "messages+price", price))

    outcome = constrained(solver, limit, report=report)
    known.offer(small.restore(outcome.choices))
    # A bound above the dual's rests on enumeration, too.
    enumerated = outcome.bound - outcome.proven > ROUNDING * abs(outcome.bound)
    messages = "messages+price" if outcome.price else "messages"
    kind = "enumeration" if enumerated else messages
    known.prove(outcome.bound, _proof(known, small, solver, kind, outcome.price))


def _proof(
    known: Incumbent, small: Reduction, solver: Minimiser, kind: str, price: float = 0.0
) -> Proof:
    return Proof(
        kind=kind,
        limit=known.limit,
        price=price,
        max_entries=solver.max_entries,
        pruned=any(substitutes is not None for substitutes in small.substitutes),
    )
