"""The least memory of devices and hosts that a candidate without stages needs."""

from __future__ import annotations

import math

import numpy as np

from autopar.costmodel.step.host import state_bytes
from autopar.search import Infeasible

from .candidate_solver import CandidateSolver
from .candidates import Candidate
from .memory_beyond_tables import bytes_beyond
from .solved_candidate import Mode
from .solving import QUICK_METHOD, solve_within
from .tuning import TUNING


def least_hosted(solver: CandidateSolver) -> float:
    """Bytes of optimizer state that a host holds for each device at the least, where all of it is there: split over all devices."""
    graph, optimizer, types = solver.folded.graph, solver.request.optimizer, solver.request.types
    devices = np.array([solver.request.cluster.devices])
    return math.fsum(float(state_bytes(t, devices, optimizer, types)[0]) for t in graph.parameters if t.trainable)


def least_needed(solver: CandidateSolver, candidate: Candidate, mode: Mode) -> float:
    """Bytes of a device under the thriftiest solution of a candidate without stages, as the folded graph's program has it."""
    tables = solver.folded_tables(candidate, mode, 0.0)
    if (stored := tables.least_stored()) > solver.memory_limit(candidate):
        return stored
    allowed = 0.0
    while allowed <= TUNING.likely * solver.room(candidate):
        try:
            solution = solve_within(tables, QUICK_METHOD, allowed)
            break
        except Infeasible as error:
            allowed = error.minimum_memory * (1 + TUNING.certain)
    else:
        return solver.always + allowed
    schedule = solver.schedule(mode, candidate.micro_batches, [tables.prices], short=True)
    return solver.always + solution.memory + bytes_beyond(tables, solution, schedule, solver.folded.counts, 0.0)
