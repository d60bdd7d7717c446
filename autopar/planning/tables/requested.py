"""The tables that a request asks for: within its pins, and with choices of host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.errors import UsageError
from autopar.planning.model import Request
from autopar.planning.model.restrictions import Limits
from autopar.planning.space import Multiplicities
from autopar.search import NoAssignment
from autopar.sharding.analysis import Analysis

from .build import build_tables, least_saved
from .offload import offering_host
from .tables import Known, Tables

T = TypeVar("T")

QUICK_ON_MANY_AXES = "recursive_programming"
"""The method for which choices are left out on meshes of many axes, before they have prices."""
RUNS = 3
"""The most runs of equal components of its choices. On meshes of up to three axes these are all;
beyond, the choices grow with the square of the axes, and no longer by a factor with each.
"""


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
    priced = partial(build_tables, work=work, known=known)
    return _asked(priced, request, analysis, prices, whole=whole)


def requested_least_saved(
    request: Request,
    analysis: Analysis,
    prices: MeshPrices,
    work: Multiplicities,
    *,
    whole: bool,
    known: Known,
) -> float:
    """The least bytes that operators save within the request's pins; raises as the tables do."""
    priced = partial(least_saved, work=work, known=known)
    return _asked(priced, request, analysis, prices, whole=whole)


def _asked(
    priced: Callable[..., T],
    request: Request,
    analysis: Analysis,
    prices: MeshPrices,
    *,
    whole: bool,
) -> T:
    """Call `priced` within the pins of a request; raises as `requested_tables`."""
    try:
        return priced(
            analysis,
            prices,
            optimizer=request.optimizer,
            limits=_limits(request, analysis, prices),
            types=request.types,
        )
    except UsageError:
        # Nobody asked for this number of micro-batches, so that it is no mistake of the user.
        if whole:
            raise
        raise NoAssignment from None


def _limits(request: Request, analysis: Analysis, prices: MeshPrices) -> Limits:
    """The limits of a request's pins; without pins those of its method of search."""
    # What is pinned is left as it is, by whatever method.
    if request.limits is not None:
        return request.limits(analysis, prices.mesh)
    return Limits(runs=RUNS if request.search == QUICK_ON_MANY_AXES else None)


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
