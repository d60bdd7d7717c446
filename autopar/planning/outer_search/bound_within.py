"""Bounds of candidates without stages within the memory, in all their modes."""

from __future__ import annotations

import functools

from autopar.planning.bounds.last_backward import at_once, counted_once, without_gradients
from autopar.planning.bounds.within_memory import least_within
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode
from autopar.planning.tables.parameters.traffic import most_hidden
from autopar.planning.tables.requested import with_host_choices
from autopar.planning.tables.tables import Tables

from .candidate_solver import CandidateSolver


def surely(solver: CandidateSolver, candidate: Candidate, enough: float, wanted: float) -> float:
    """Seconds that no step of a candidate without stages undercuts within the memory (see
    `least_within`).
    """
    early = solver.bounds.early(1, candidate.mesh).before
    every = (functools.partial(loosest, solver, candidate, mode) for mode in solver.modes())
    return least_within(every, solver.room(candidate), enough + early, wanted + early) - early


def loosest(
    solver: CandidateSolver, candidate: Candidate, mode: Mode, covers: float = 0.0
) -> Tables:
    """The tables of a candidate with all hidden (`covers`: see `most_hidden`), and only bytes that
    are surely there at once.
    """
    work = most_hidden(
        solver.work(candidate, mode, solver.folded.counts, short=True),
        solver.prices(candidate),
        covers,
    )
    tables = with_host_choices(
        solver.request, solver.plain_tables(candidate, work), candidate.stages
    )
    if not solver.request.train:
        return tables
    # With one micro-batch gradients appear as activations are freed.
    one = candidate.micro_batches == 1
    tables = without_gradients(tables) if one else counted_once(tables, work)
    return at_once(tables, work.segments, candidate.micro_batches)
