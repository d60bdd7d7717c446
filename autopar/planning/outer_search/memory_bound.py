"""Candidates that memory binds, solved so that their programs fit.

What a program needs beyond the sum of its tables is known only once it is solved:

    memory(program) = memory(tables) + beyond(solution)

So a candidate is solved within limits that close in on the memory. Where programs are cheap to
make (small models of brief steps), the solutions on the front of (bytes, seconds) of its tables are
played instead: they are the same for every limit, so that more memory seldom makes a plan slower.
"""

from __future__ import annotations

import functools
import math

from autopar.planning.model.effort import EFFORT
from autopar.planning.programs.front import Front, Pricing, StagePricing, price_alone
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.solve.within_limits import quick_method, solve_within
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode
from autopar.planning.stages.parts import Terms
from autopar.planning.stages.whole_model import expand
from autopar.planning.tables.tables import Tables
from autopar.search import Infeasible

from .candidate_solver import CandidateSolver


class MemoryBound:
    """Solves candidates within the memory.

    `fronts`, `prices`: those of the candidates so far.
    """

    def __init__(self, solver: CandidateSolver) -> None:
        self.solver = solver
        self.fronts: dict[tuple[Case, bool], Front] = {}
        self.prices: dict[tuple[Candidate, Mode], Pricing] = {}

    @property
    def on_fronts(self) -> bool:
        """Whether candidates are looked for on fronts: small models with brief steps."""
        return self.solver.is_brief and self.solver.is_exact

    def front(self, case: Case, tables: Tables) -> Front:
        """The front of a case's tables, with or without choices of host memory."""
        candidate = case.candidate
        solver = self.solver
        offers_host = any(variable.host is not None for variable in tables.variables)
        # Once memory is known to bind a case its tables offer more, so that its front is another.
        key = (case, offers_host)
        if key not in self.fronts:
            price = self._price(candidate, case.mode)
            self.fronts[key] = Front(tables, price, solver.memory_limit(candidate))
        return self.fronts[key]

    def _price(self, candidate: Candidate, mode: Mode) -> Pricing:
        """The pricing of a candidate's solutions in a mode, whatever its tables count as hidden."""
        if (candidate, mode) not in self.prices:
            self.prices[candidate, mode] = self._pricing(candidate, mode)
        return self.prices[candidate, mode]

    def _pricing(self, candidate: Candidate, mode: Mode) -> Pricing:
        solver = self.solver
        # Without stages solutions are priced on the whole graph, pipelines on the folded one.
        schedule = solver.schedule_of(candidate, mode, short=candidate.stages > 1)
        if candidate.stages == 1:
            limit = solver.memory_limit(candidate)
            count = candidate.micro_batches
            return price_alone(solver.folded, count, schedule, limit)
        terms = Terms(
            request=solver.request,
            schedule=schedule,
            always=solver.always,
            expand=functools.partial(expand, solver.folded),
        )
        return StagePricing(solver.group(candidate), terms)

    def solve(self, case: Case, tables: Tables, beyond: float) -> Solved:
        """The solution that promises least within the memory; raises `Infeasible`.

        `beyond`: of the solution without a limit.
        """
        if self.on_fronts:
            return self._first_on_front(case, tables)
        return self._closing_in(case, tables, beyond)

    def _first_on_front(self, case: Case, tables: Tables) -> Solved:
        """The first solution of the front whose tables fit: none that fits promises less."""
        front = self.front(case, tables)
        room = self.solver.room(case.candidate)
        for solution in front.solutions():
            hosted = tables.host_of(solution.choices) <= tables.host_room
            if solution.memory <= room and hosted:
                return self.solver.promised(case, tables, solution)
        # The last of a front needs least memory. Its bytes may fit where only the host lacks room,
        # but the error has to name more than the room.
        raise Infeasible(max(front.taken[-1].memory, math.nextafter(room, math.inf)), room)

    def _closing_in(self, case: Case, tables: Tables, beyond: float) -> Solved:
        """The best of a few solutions, each within the room that the one before it leaves."""
        solver = self.solver
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
                    # The bytes beyond the tables, as they were set apart for this solution, count
                    # on top.
                    least = min(least, room - allowed + error.minimum_memory)
                break
            beyond = solver.beyond(case, tables, solution)
            needed = solution.memory + beyond
            least = min(least, needed)
            if needed <= room:
                if best is None or solution.cost < best.solution.cost:
                    best = solver.promised(case, tables, solution, beyond=beyond)
                # The memory is as good as full, so a looser limit could find nothing faster that
                # fits.
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
