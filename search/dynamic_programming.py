"""The exact search: prune, eliminate variable by variable; with a memory limit, price the bytes and close the gap.

    best(graph) = min over x of  cost(x)              elimination.py (the order), minplus.py (the joins)
                  subject to  memory(x) <= limit      memory_limit.py (the price), mixtures.py and labels.py (the gap)

Source: U. Bertele and F. Brioschi, Nonserial Dynamic Programming (1972); H. Everett III, Generalized Lagrange
Multiplier Method (1963). If exact tables would be too wide or take too long, narrow ones come first (conditioning.py):
they mostly find the same assignment in a hundredth of the time, and the gap of the solution shows whether wider tables
are worth their work.
"""

import math
from dataclasses import dataclass, replace

from .conditioning import Minimiser, Minimum, shrink, soften
from .costgraph import CostGraph, Infeasible, NoAssignment, Proof, Solution
from .elimination import MAX_ENTRIES
from .interruption import Incumbent, Interrupted
from .local_search import descend
from .memory_limit import constrained
from .narrowing import PASS, WORK, narrow
from .pruning import Reduction, reduce
from .recursive_programming import recursive_programming

METHOD = "dynamic_programming"
NARROW = (1 << 16, 1 << 18, 1 << 21)
"""The largest entries of a table that are tried, in this order, if exact tables are too wide or take too long."""
EXACT_WORK = 2e9
"""Additions (a few seconds) above which narrower tables come first, and wider ones only while nothing is found."""
NEARLY_WORK, PASSABLE = 2e8, 2e-2
"""The same of each pass, and the gap that is good enough above it where none of rounding is asked for."""
LIGHT_WORK = 1e9
"""Additions of a relaxation up to which it takes less time than pruning saves."""
HOPEFUL = 1e-2
"""The largest gap of the first assignment at which its cost rules out choices before a better one is searched."""
ROUNDING = 1e-9
"""Relative distance of bounds that are equal but for rounding."""


def dynamic_programming(graph: CostGraph, *, memory_limit: float | None = None) -> Solution:
    """The optimum, or a solution with a certified gap if the graph is too wide, or large with a tight memory limit.

    A KeyboardInterrupt becomes `Interrupted`, with the best solution so far.
    """
    return eliminate_variables(graph, memory_limit=memory_limit, max_entries=MAX_ENTRIES)


def nearly(graph: CostGraph, *, close: float, enough: float = math.inf, room: float = math.inf, loose: float = 0.0) -> Solution:
    """A solution without a memory limit whose gap is at most `close`, or whose bound is `enough`: the optimum where that takes no longer.

    One that takes more bytes than `room` need only be as near as `loose`. On graphs that are too wide and too large for that, the first
    solution whose gap is `PASSABLE`.
    """
    aim = Aim(close=close, enough=enough, room=room, loose=loose)
    return eliminate_variables(graph, memory_limit=None, max_entries=MAX_ENTRIES, aim=aim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The gap, or the bound, at which a search ends; at a gap of `loose`, too, with an assignment that takes more bytes than `room`."""

    close: float = ROUNDING
    enough: float = math.inf
    room: float = math.inf
    loose: float = 0.0

    @property
    def work(self) -> float:
        """Additions that may be spent on a smaller gap."""
        return WORK if self.close <= ROUNDING else 4 * NEARLY_WORK

    def costly(self, solver: Minimiser) -> bool:
        """Whether a single pass of a smaller gap is more than that, where the gap need not be one of rounding."""
        return self.close > ROUNDING and PASS * solver.plan.volume > self.work

    def reached(self, known: Incumbent) -> bool:
        """Whether that is what is known."""
        if known.choices is None:
            return False
        over = known.gap <= self.loose and known.graph.memory_of(known.choices) > self.room
        return known.gap <= self.close or known.bound >= self.enough or over


def eliminate_variables(graph: CostGraph, *, memory_limit: float | None, max_entries: int, aim: Aim | None = None) -> Solution:
    """`dynamic_programming` with tables of at most `max_entries` entries, until the `aim` is reached."""
    known = Incumbent(graph, memory_limit, METHOD)
    try:
        _search(known, max_entries, aim or Aim())
        if known.choices is None:
            raise ValueError("the graph is too wide to eliminate exactly, and no assignment of finite cost was found; forbid less")
        return known.solution()
    except KeyboardInterrupt as interrupt:
        raise Interrupted(known.salvage()) from interrupt


def _search(known: Incumbent, max_entries: int, aim: Aim) -> None:
    free = known.limit is None
    small, plan = shrink(known.graph, max_entries=max_entries, memory=not free, prune=not free)
    if plan is None and free:
        left = _narrowed(known, small, min(NARROW[0], max_entries), aim)
        if left is None:
            return
        small = left
    widest = Minimiser(small.graph, max_entries=max_entries, plan=plan)
    if widest.exact and widest.plan.work <= EXACT_WORK:
        try:
            _assign(known, small, widest)
        except NoAssignment:
            # Narrowing keeps all cheaper assignments; none is left, so the known one is the optimum.
            if known.choices is None:
                raise
            known.prove(known.cost, replace(known.proof, kind="enumeration"))
        return
    _offer_fast(known)
    proven, work = False, 0.0
    for width in (*(width for width in NARROW if width < max_entries), max_entries):
        last = width == max_entries
        solver = Minimiser(small.graph, max_entries=width)
        # A wider limit is skipped if it changes no table, takes too long, or has no gap to close.
        if proven and (solver.plan.work == work or solver.plan.work > EXACT_WORK or aim.reached(known)):
            continue
        work = solver.plan.work
        try:
            minimum = _assign(known, small, solver)
        except Infeasible:
            # Narrow tables may miss an assignment of little memory.
            if last:
                raise
            continue
        proven = known.choices is not None
        if minimum is None or aim.reached(known) or aim.costly(solver):
            continue
        left = narrow(known, small, solver, minimum, close=aim.close, work=aim.work)
        if left is None:
            return
        small = left


def _narrowed(known: Incumbent, whole: Reduction, width: int, aim: Aim) -> Reduction | None:
    """The graph without the choices that its relaxation rules out, if it is too wide for exact tables; None if solved.

    Mostly a few variables are split, such as a value that all layers of a decoder read, and what their copies want is so near the optimum
    that little else is left.
    """
    small, solver = whole, Minimiser(whole.graph, max_entries=width)
    if solver.exact or solver.plan.work > LIGHT_WORK:
        small = reduce(known.graph, memory=False)
        solver = Minimiser(small.graph, max_entries=width)
    if solver.exact:
        return small
    minimum = solver.minimise(improve=False)
    known.offer(small.restore(descend(soften(small.graph), minimum.choices)))
    pruned = any(substitutes is not None for substitutes in small.substitutes)
    known.prove(minimum.bound, Proof(kind="messages", limit=None, price=0.0, max_entries=solver.max_entries, pruned=pruned))
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
    """Offer the fast search's assignment to begin with."""
    try:
        known.offer(recursive_programming(known.graph, memory_limit=known.limit).choices)
    except ValueError as error:
        if isinstance(error, NoAssignment):
            raise


def _assign(known: Incumbent, small: Reduction, solver: Minimiser) -> Minimum | None:
    """Offer `known` an assignment and a bound of all assignments within the limit; the minimum if there is no limit."""
    limit = known.limit
    pruned = any(substitutes is not None for substitutes in small.substitutes)

    def proof(kind: str, price: float = 0.0) -> Proof:
        return Proof(kind=kind, limit=limit, price=price, max_entries=solver.max_entries, pruned=pruned)

    def report(choices: list[int], bound: float, price: float) -> None:
        known.offer(small.restore(choices))
        known.prove(bound, proof("messages+price", price))

    if limit is None:
        minimum = solver.minimise()
        known.offer(small.restore(minimum.choices))
        known.prove(known.cost if solver.exact else minimum.bound, proof("messages"))
        return minimum
    found = constrained(solver, limit, report=report)
    known.offer(small.restore(found.choices))
    # A bound above the dual's rests on enumeration, too.
    enumerated = found.bound - found.proven > ROUNDING * abs(found.bound)
    messages = "messages+price" if found.price else "messages"
    known.prove(found.bound, proof("enumeration" if enumerated else messages, found.price))
    return None
