"""Other solutions of the best candidates, ranked by their programs: the optimum of the tables need not be that of the program.

What a sum over single choices cannot see (which of the collectives of parameters find something to hide under, and which stage is the
slowest) is up to a fifth of a step that mostly launches. Near the tables' optimum lie solutions that are better there:

    x(l, p) = argmin over x of  X(x) + (1 - l) G(x) + p memory(x)

for a few shares l of the collectives of parameters G that are hidden, and, at the share that the tables take for hidden, for the first
prices p of a byte on the front of the candidate (`fronts.py`); each also with all parameters stored whole, which costs more by the tables
than by a program that mostly launches. None of them depends on the memory limit, but for whether it fits. They are looked at where the
bound leaves room for something better.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from autopar.search import Infeasible, NoAssignment

from .candidate_solver import CandidateSolver
from .solved_candidate import Mode, Solved
from .tuning import TUNING


def variations(solver: CandidateSolver, solved: Solved, below: float = math.inf) -> Iterator[Solved]:
    """Other solutions of a candidate, as the mode is and with all parameters whole, with the seconds of their programs.

    Left out are those that do not fit, and those that promise no less than `below` seconds.
    """
    candidate = solved.candidate
    seen = {solved.solution.choices}
    for mode in _modes(solver, solved):
        for hidden, count in _varied(solver, solved):
            with contextlib.suppress(Infeasible, NoAssignment):
                tables = solver.folded_tables(candidate, mode, hidden)
                front = solver.front(candidate, mode, tables, hidden)
                for priced in itertools.islice(front.near(), count):
                    if solver.as_solved(candidate, mode, tables, priced.solution, hidden=hidden).seconds >= below:
                        break
                    if priced.solution.choices not in seen:
                        seen.add(priced.solution.choices)
                        yield solver.of_program(priced, candidate, mode, tables, hidden)


def _modes(solver: CandidateSolver, solved: Solved) -> Iterator[Mode]:
    """The mode of a solution, and where parameters may be stored whole, that."""
    yield solved.mode
    if solved.mode.zero == 1 and solver.request.zero is None and solver.request.train:
        yield replace(solved.mode, zero=0)


def _varied(solver: CandidateSolver, solved: Solved) -> Iterator[tuple[float, int]]:
    """The shares that are hidden, each with the number of solutions on its front."""
    hidden = solver.hides(solved.candidate, solved.mode)
    yield hidden, TUNING.varied_front
    most = 1.0 if solved.candidate.stages > 1 else hidden
    if solver.request.train:
        for part in TUNING.varied_hidden:
            if not math.isclose(part * most, hidden):
                yield part * most, 1
