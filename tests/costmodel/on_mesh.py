"""The best program on one mesh, in one pass, without the walk over meshes, stages and
micro-batches.
"""

from __future__ import annotations

import math
from typing import Literal

from autopar.costmodel.memory.states import certain_bytes
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.planning.model.request import Request
from autopar.planning.programs.priced_program import (
    DraftProgram,
    PricedProgram,
    smallest,
    thriftier,
)
from autopar.planning.solve.within_limits import solve_within
from autopar.planning.space.multiplicities import Multiplicities
from autopar.planning.tables.build import build_tables
from autopar.planning.tables.requested import with_host_choices
from autopar.search import Infeasible
from autopar.sharding.analysis import Analysis
from autopar.sharding.mesh import Mesh
from autopar.sharding.schedule import Schedule


def best_on_mesh(analysis: Analysis, mesh: Mesh, request: Request) -> PricedProgram:
    """The best program; raises `Infeasible` when none fits, `NoAssignment` when the limits forbid
    all.
    """
    prices = MeshPrices.of(
        request.cluster, mesh, sum(tensor.bytes for tensor in analysis.graph.parameters)
    )
    limits = request.limits(analysis, mesh) if request.limits else None
    zero = 1 if request.zero is None else request.zero
    tables = build_tables(
        analysis,
        prices,
        optimizer=request.optimizer,
        limits=limits,
        work=Multiplicities(zero=zero),
        types=request.types,
    )
    tables = with_host_choices(request, tables, 1, binding=False)
    room = max(request.memory_limit - certain_bytes(analysis), 0.0)
    gathered: Literal["per_step", "per_pass"] = "per_pass" if zero == 3 else "per_step"
    schedule = Schedule(
        gathered=gathered,
        unit_bytes=prices.unit_bytes,
        types=request.types,
        reductions=request.reductions,
    )
    limit = request.memory_limit
    try:
        for _ in range(6):
            solution = solve_within(tables, request.search, room)
            draft = thriftier(DraftProgram.of(tables, solution, schedule), limit)
            over = draft.memory.total - limit
            if over <= 0:
                return draft.priced()
            # A thriftier solution is likely to need as much beyond its tables.
            room = min(room, tables.graph.memory_of(solution.choices)) - over
    except Infeasible:
        if math.isinf(limit):
            raise
    return smallest(tables, method=request.search, memory_limit=limit, schedule=schedule)
