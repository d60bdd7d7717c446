"""The tables that a request asks for: within its pins, and with choices of host memory."""

from __future__ import annotations

from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.errors import UsageError
from autopar.planning.model import Request
from autopar.planning.space import Multiplicities
from autopar.search import NoAssignment
from autopar.sharding.analysis import Analysis

from .build import build_tables
from .offload import offering_host
from .tables import Known, Tables


def requested_tables(
    request: Request,
    analysis: Analysis,
    prices: MeshPrices,
    work: Multiplicities,
    *,
    whole: bool,
    known: Known | None = None,
) -> Tables:
    """The tables within the request's pins.

    `whole`: the analysis is of the whole batch. A micro-batch may be too small for a pinned split,
    which raises `NoAssignment`: this candidate is out. The whole batch being too small is the
    user's mistake, and raises `UsageError`.
    """
    try:
        limits = request.limits(analysis, prices.mesh) if request.limits is not None else None
        return build_tables(
            analysis,
            prices,
            optimizer=request.optimizer,
            limits=limits,
            work=work,
            known=known,
            types=request.types,
        )
    except UsageError:
        if whole:
            raise
        raise NoAssignment from None


def with_host_choices(
    request: Request, tables: Tables, stages: float, *, binding: bool = True
) -> Tables:
    """Tables of so many stages, with choices of host memory if these are requested or may help.

    `binding`: the device's memory limits the choices, so that host memory may help.
    """
    pinned = request.offload == "optimizer" or request.hosted is not None
    if not pinned and not (binding and request.may_offload):
        return tables
    room = stages * request.host_on(tables.prices.cluster)
    return offering_host(
        tables, room=room, only=request.offload == "optimizer", hosted=request.hosted
    )
