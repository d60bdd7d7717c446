"""Where no program is known that fits: the first of the thriftiest candidates that does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from autopar.costmodel.step.host_offload import state_bytes
from autopar.planning.model.effort import EFFORT
from autopar.planning.programs.priced_program import PricedProgram, smallest
from autopar.planning.solve.peak_beyond_tables import bytes_beyond
from autopar.planning.solve.within_limits import QUICK_METHOD, solve_within
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode
from autopar.search import Infeasible

from .candidate_solver import CandidateSolver
from .misfits import Misfit
from .whole_programs import WholePrograms

LOOKED = 2
"""How many misfits of large models are made into programs for the size that would do, at least."""


def thriftiest(
    misfits: Iterable[Misfit], programs: WholePrograms, failures: list[Infeasible]
) -> PricedProgram | None:
    """The first program without stages that fits, of the candidates that need least memory.

    What it needs that does not fit is added to `failures`.
    """
    solver = programs.solver
    small = solver.folded.is_small
    # Programs of small models are cheap to make, so more of them are tried.
    most = 2 * EFFORT.tried if small else EFFORT.tried
    looked = 0
    for misfit in _in_turns(misfits)[:most]:
        candidate = misfit.candidate
        mode = misfit.mode
        limit = solver.memory_limit(candidate)
        # A program that cannot fit is made only for its size; the first ones are as good as any.
        sure = looked < LOOKED or small
        if not sure and least_needed(solver, candidate, mode) > EFFORT.likely * limit:
            continue
        looked += 1
        try:
            return smallest(
                programs.tables(candidate, mode),
                method=solver.request.search,
                memory_limit=limit,
                schedule=programs.schedule(candidate, mode),
            )
        except Infeasible as error:
            failures.append(error)
    return None


def _in_turns(misfits: Iterable[Misfit]) -> list[Misfit]:
    """Misfits without stages, the thriftiest first, every number of micro-batches in its turn.

    Tables misjudge the memory of each number of micro-batches in its own way.
    """
    alone = sorted((m for m in misfits if m.candidate.stages == 1), key=lambda m: m.needed)
    turn: Counter[int] = Counter()
    turns: list[tuple[int, int, Misfit]] = []
    for misfit in alone:
        count = misfit.candidate.micro_batches
        turns.append((turn[count], len(turns), misfit))
        turn[count] += 1
    # Without the misfits themselves, which have no order.
    return [misfit for _, _, misfit in sorted(turns, key=lambda entry: entry[:2])]


def least_hosted(solver: CandidateSolver) -> float:
    """Bytes of optimizer state that a host holds for each device, where all of it is split."""
    optimizer = solver.request.optimizer
    types = solver.request.types
    devices = np.array([solver.request.cluster.devices])
    trained = [tensor for tensor in solver.folded.graph.parameters if tensor.trainable]
    return math.fsum(float(state_bytes(t, devices, optimizer, types)[0]) for t in trained)


def least_needed(solver: CandidateSolver, candidate: Candidate, mode: Mode) -> float:
    """Bytes of a device under the thriftiest folded program of a candidate without stages."""
    case = replace(solver.case(candidate, mode), hidden=0.0)
    tables = solver.tables(case)
    if (stored := tables.least_stored()) > solver.memory_limit(candidate):
        return stored
    allowed = 0.0
    while allowed <= EFFORT.likely * solver.room(candidate):
        try:
            solution = solve_within(tables, QUICK_METHOD, allowed)
            break
        except Infeasible as error:
            # A limit of 0 fails, and the error names the least bytes. Rounding may make just these
            # too few, so a little is added.
            allowed = error.minimum_memory * (1 + EFFORT.bounded)
    else:
        return solver.always + allowed
    schedule = solver.schedule_of(candidate, mode, short=True)
    # No room at all asks for the smallest units of parameters.
    beyond = bytes_beyond(tables, solution, schedule, solver.folded.counts, 0.0)
    return solver.always + solution.memory + beyond
