"""Other solutions of the best candidates, ranked by their programs: the optimum of the tables need not be that of the program.

What a sum over single choices cannot see (which of the collectives of parameters find something to hide under, and which stage is the
slowest) is up to a fifth of a step that mostly launches. Near the tables' optimum lie solutions that are better there:

    x(l, s) = argmin over x of  X(x) + (1 - l) G(x)   subject to   memory(x) <= s memory(x*)

for a few shares l of the collectives of parameters G that are hidden, and s of the bytes of the solution x* that is known. They are
looked at where the bound leaves room for something better.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from autopar.search import Infeasible, NoAssignment

from .candidate_solver import CandidateSolver
from .solved_candidate import Solved
from .solving import QUICK_METHOD, solve_within
from .tuning import TUNING


def variations(solver: CandidateSolver, solved: Solved) -> Iterator[Solved]:
    """Other solutions of a candidate, in the same mode, with the seconds of their programs; those that do not fit are left out."""
    seen = {solved.solution.choices}
    for hidden, share in _varied(solver, solved):
        with contextlib.suppress(Infeasible, NoAssignment):
            tables = solver.folded_tables(solved.candidate, solved.mode, hidden)
            solution = solve_within(tables, QUICK_METHOD, share * solved.solution.memory if share < 1 else solver.room(solved.candidate))
            if solution.choices in seen or tables.host_of(solution.choices) > tables.host_room:
                continue
            seen.add(solution.choices)
            beyond = solver.beyond(solved.candidate, solved.mode, tables, solution)
            if solution.memory + beyond <= solver.room(solved.candidate):
                yield solver.cut(solver.as_solved(solved.candidate, solved.mode, tables, solution, beyond=beyond, hidden=hidden))


def _varied(solver: CandidateSolver, solved: Solved) -> Iterator[tuple[float, float]]:
    """The shares that are hidden, and of the bytes that are used."""
    most = 1.0 if solved.candidate.stages > 1 else solver.hides(solved.candidate, solved.mode)
    if solver.request.train:
        for part in TUNING.varied_hidden:
            if not math.isclose(part * most, solved.hidden):
                yield part * most, 1.0
    for share in TUNING.varied_memory:
        yield solved.hidden, share
