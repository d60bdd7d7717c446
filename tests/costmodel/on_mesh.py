"""The best program on one mesh, in one pass, without the walk over meshes, stages and micro-batches."""

from __future__ import annotations

from typing import Literal

from autopar.costmodel.memory.peak import certain_bytes
from autopar.costmodel.step.pricing import MeshPrices
from autopar.planning.building import build_tables
from autopar.planning.multiplicities import Multiplicities
from autopar.planning.priced_program import PricedProgram, best_within
from autopar.planning.request import Request
from autopar.sharding.analysis import Analysis
from autopar.sharding.mesh import Mesh
from autopar.sharding.schedule import Schedule


def best_on_mesh(analysis: Analysis, mesh: Mesh, request: Request) -> PricedProgram:
    """The best program; raises `Infeasible` when none fits, `NoAssignment` when the limits forbid all."""
    prices = MeshPrices.of(request.cluster, mesh, sum(tensor.bytes for tensor in analysis.graph.parameters))
    limits = request.limits(analysis, mesh) if request.limits else None
    zero = 1 if request.zero is None else request.zero
    tables = build_tables(analysis, prices, optimizer=request.optimizer, limits=limits, work=Multiplicities(zero=zero), types=request.types)
    tables = request.offering(tables, 1, binding=False)
    room = max(request.memory_limit - certain_bytes(analysis), 0.0)
    gathered: Literal["again", "kept"] = "again" if zero == 3 else "kept"
    schedule = Schedule(gathered=gathered, unit_bytes=prices.unit_bytes, types=request.types, reductions=request.reductions)
    return best_within(tables, method=request.method, memory_limit=request.memory_limit, room=room, schedule=schedule)
