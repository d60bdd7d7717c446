"""Solutions of a candidate within its memory, on the front of its tables or by limits that close in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autopar.search import Infeasible

from .candidates import Candidate
from .solved_candidate import Mode, Solved
from .solving import EXACT_METHOD, QUICK_METHOD, solve_within
from .tables import Tables
from .tuning import TUNING

if TYPE_CHECKING:
    from .candidate_solver import CandidateSolver


def on_front(solver: CandidateSolver, candidate: Candidate, mode: Mode, tables: Tables, hidden: float, below: float) -> Solved:
    """The fastest solution on the front of a candidate whose program fits; of stages, and where the tables put all that may fit far above
    `below` seconds, the first that there is room for."""
    front, room = solver.front(candidate, mode, tables, hidden), solver.room(candidate)
    first = next((one for one in front.solutions() if one.memory <= room and tables.host_of(one.choices) <= tables.host_room), None)
    if first is None:
        raise Infeasible(max(front.found[-1].memory, math.nextafter(room, math.inf)), room)
    if candidate.stages > 1 or first.cost > TUNING.cut * below:
        return solver.as_solved(candidate, mode, tables, first, hidden=hidden)
    try:
        return solver.of_program(front.best(), candidate, mode, tables, hidden)
    except Infeasible as error:
        raise Infeasible(max(error.minimum_memory - solver.always, math.nextafter(room, math.inf)), room) from None


def filled(solver: CandidateSolver, candidate: Candidate, mode: Mode, tables: Tables, hidden: float, beyond: float) -> Solved:
    """The solution of tables whose program fits the memory: what programs need beyond them is found out as they are solved, from that
    of the solution without a limit on."""
    room = solver.room(candidate)
    method = QUICK_METHOD if solver.request.method == EXACT_METHOD else solver.request.method
    allowed, best, least = max(room - beyond, 0.0), None, math.inf
    for _ in range(TUNING.fittings):
        try:
            solution = solve_within(tables, method, allowed)
        except Infeasible as error:
            if best is None:
                least = min(least, room - allowed + error.minimum_memory)
            break
        beyond = solver.beyond(candidate, mode, tables, solution)
        fits, least = solution.memory + beyond <= room, min(least, solution.memory + beyond)
        if fits and (best is None or solution.cost < best.solution.cost):
            best = solver.as_solved(candidate, mode, tables, solution, beyond=beyond, hidden=hidden)
        if fits and solution.memory + beyond >= TUNING.full * room:
            break
        # What is beyond differs from solution to solution: the next one has the room that this one's leaves.
        following = room - beyond
        if abs(following - allowed) < (1 - TUNING.full) * room:
            # The same solution would be found again within what is just below its limit.
            following = min(allowed, solution.memory) - (solution.memory + beyond - room) if not fits else allowed
        if following == allowed or following <= 0:
            break
        allowed = following
    if best is None:
        raise Infeasible(max(least, math.nextafter(room, math.inf)), room)
    return best
