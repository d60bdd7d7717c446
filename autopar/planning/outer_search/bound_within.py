"""Bounds of candidates without stages within the memory, in all their modes."""

from __future__ import annotations

import functools

from autopar.costmodel.memory.saved_values import saved_values
from autopar.ir import Tensor
from autopar.planning.bounds.within_memory import least_within
from autopar.planning.space import Multiplicities
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode
from autopar.planning.tables.parameters.traffic import most_hidden
from autopar.planning.tables.requested import with_host_choices
from autopar.planning.tables.tables import Floats, Ints, Tables

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
    return tables.lighter(functools.partial(_gradient, tables)) if one else once(tables, work)


def once(tables: Tables, work: Multiplicities) -> Tables:
    """Tables in which no gradient counts twice.

    One that is added up whole counts with the operators that save its parameter. Its shard, which
    counts with storage, is made as the whole one goes.
    """
    if work.zero != 1 or not work.accumulating:
        return tables
    saved = saved_values(
        tables.analysis, work.segments, tables.prices.cluster.framework.saving
    ).weights

    def spared(tensor: Tensor, shards: Ints) -> Floats:
        return _gradient(tables, tensor, shards) * (tensor.name in saved)

    return tables.lighter(spared)


def _gradient(tables: Tables, tensor: Tensor, shards: Ints) -> Floats:
    """Return what `storage_bytes` has for a gradient, as it is stored or as it is reduced."""
    types = tables.types
    return max(types.stored_bytes(tensor), types.reduced_bytes(tensor)) / shards
