"""Cases that do not fit the memory, and requests of which nothing does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.errors import UsageError
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.groups import CandidateGroups
from autopar.planning.space.modes import Mode
from autopar.search import NoAssignment

from .candidate_solver import CandidateSolver


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A case that does not fit the memory, and the least bytes that it needs on a device.

    `bounded`: the bytes are a bound from below, which no solution shows to do.
    """

    candidate: Candidate
    mode: Mode
    needed: float
    bounded: bool = False


def surely_misfits(folded: FoldedModel, request: Request) -> bool:
    """Whether parameters with their gradients and state alone exceed the memory on every mesh.

    False where that is not certain, as where state may be in host memory or devices may be idle.
    """
    hosted = request.may_offload or request.offload == "optimizer" or request.hosted is not None
    if hosted or request.fewer or len(request.cluster.pools) > 1:
        return False
    solver = CandidateSolver(folded, request)
    groups = CandidateGroups(folded, request).groups(request.cluster.devices)
    places = 0
    for _, every in groups:
        if _is_stored(solver, every):
            return False
        places += 1
    return places > 0


def _is_stored(solver: CandidateSolver, candidates: Iterable[Candidate]) -> bool:
    """Whether the memory of the candidates of a mesh may hold all parameters with their state."""
    # No number of micro-batches, and no recompute, changes the bytes of what is stored.
    mode = next(iter(solver.modes()))
    for candidate in candidates:
        try:
            tables = solver.tables(solver.case(candidate, mode))
        # Pins may forbid some numbers of micro-batches, or all: a search says so.
        except (NoAssignment, UsageError):
            continue
        return tables.least_stored() <= solver.room(candidate)
    return False
