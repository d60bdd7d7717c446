"""Candidates that memory binds, solved so that their programs fit.

What a program needs beyond the sum of its tables is known only once it is solved:

    memory(program) = memory(tables) + beyond(solution)

So a candidate is solved within limits that close in on the memory.
"""

from __future__ import annotations

import math

from autopar.planning.model.effort import EFFORT
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.solve.within_limits import quick_method, solve_within
from autopar.planning.tables.tables import Tables
from autopar.search import Infeasible

from .candidate_solver import CandidateSolver


def solve_bound(solver: CandidateSolver, case: Case, tables: Tables, beyond: float) -> Solved:
    """The best of a few solutions, each within the room that the one before it leaves.

    `beyond`: of the solution without a limit. Raises `Infeasible`.
    """
    room = solver.room(case.candidate)
    method = quick_method(solver.request.search)
    # A first guess: beyond its tables, the program needs as much as the one without a limit.
    allowed = max(room - beyond, 0.0)
    best: Solved | None = None
    least = math.inf
    for _ in range(EFFORT.fittings):
        try:
            solution = solve_within(tables, method, allowed)
        except Infeasible as error:
            if best is None:
                # The bytes beyond the tables, as set apart for this solution, count on top.
                least = min(least, room - allowed + error.minimum_memory)
            break
        beyond = solver.beyond(case, tables, solution)
        needed = solution.memory + beyond
        least = min(least, needed)
        if needed <= room:
            if best is None or solution.cost < best.solution.cost:
                best = solver.promised(case, tables, solution, beyond=beyond)
            # The memory is as good as full, so a looser limit could find nothing faster.
            if needed >= EFFORT.full * room:
                break
        following = _next_limit(allowed, room, solution.memory, beyond)
        if following == allowed or following <= 0:
            break
        allowed = following
    if best is None:
        raise Infeasible(max(least, math.nextafter(room, math.inf)), room)
    return best


def _next_limit(allowed: float, room: float, memory: float, beyond: float) -> float:
    """The limit of the next solution: the room that this one's program leaves to its tables."""
    following = room - beyond
    if abs(following - allowed) >= (1 - EFFORT.full) * room:
        return following
    # The same solution would come again within nearly the same limit.
    over = memory + beyond - room
    return min(allowed, memory) - over if over > 0 else allowed
