"""The cost of other stages, micro-batches, recompute, ZeRO and offload.

Each is pinned, and the rest searched again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.errors import NoPlanFits, UsageError
from autopar.plan import Plan
from autopar.planning.model.progress import Progress
from autopar.planning.model.recompute import RECOMPUTES
from autopar.planning.model.request import OFFLOADS, ZEROS, Request
from autopar.planning.remembered_plans import Searches
from autopar.planning.space.candidates import divisors
from autopar.schemes import scheme_of, stages_of
from autopar.schemes.known import layers_of
from autopar.sharding.analysis import Analysis

from .side_by_side import side_by_side


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """The best plan with one variable of the outer search fixed.

    `why`: the reason if there is none.
    """

    variable: str
    value: str
    step: float | None = None
    memory: float = 0.0
    named: str = ""
    why: str = ""


def outer_alternatives(
    plan: Plan,
    analysis: Analysis,
    cluster: Cluster,
    *,
    memory: float | None = None,
    progress: Progress | None = None,
) -> list[Pinned]:
    """The best plans with each variable of the outer search fixed to other values."""
    free = Request(
        cluster=cluster,
        train=analysis.train,
        optimizer=plan.model.optimizer,
        memory=memory,
        uniform=True,
        types=plan.schedule.types,
    )
    requests = list(_requests(plan, analysis, free))
    searches = Searches(analysis.graph, free)
    # Made once, for all processes.
    _ = searches.folded

    def pinned(asked: tuple[str, str, Request]) -> Pinned:
        return _pinned(*asked, searches, analysis)

    rows = []
    for row in side_by_side(pinned, requests):
        rows.append(row)
        if progress:
            progress(len(rows), len(requests), f"{row.variable} {row.value}")
    return rows


def _pinned(
    variable: str, value: str, request: Request, searches: Searches, analysis: Analysis
) -> Pinned:
    """The best plan with a variable fixed to a value."""
    row = Pinned(variable=variable, value=value)
    try:
        plan = searches.plan(request)
    except NoPlanFits:
        return replace(row, why="does not fit the memory")
    except UsageError as error:
        return replace(row, why=str(error))
    named = scheme_of(plan, analysis).called
    return replace(row, step=plan.predicted.step, memory=plan.predicted.memory, named=named)


def _requests(plan: Plan, analysis: Analysis, free: Request) -> Iterator[tuple[str, str, Request]]:
    """The variables with the values to try.

    A count is tried at half and twice the plan's; of a choice, every value is tried.
    """
    stages = stages_of(plan)
    count = plan.schedule.micro_batches
    # A stage has at least one layer, and all stages have equally many devices.
    fits = [n for n in divisors(free.cluster.devices) if n <= layers_of(analysis)]
    for value in sorted({1, 2, stages // 2, stages * 2, stages} & {*fits}):
        yield "stages", str(value), replace(free, stages=value)
    if not analysis.train:
        return
    for value in sorted({1, count // 2, count, count * 2} - {0}):
        yield "micro-batches", str(value), replace(free, micro_batches=value)
    for mode in RECOMPUTES:
        yield "recompute", mode, replace(free, recompute=mode)
    for zero in ZEROS:
        yield "ZeRO", str(zero), replace(free, zero=zero)
    for offload in OFFLOADS if free.has_host else ():
        yield "offload", offload, replace(free, offload=offload)
