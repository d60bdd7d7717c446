"""The cost of other stages, micro-batches, recompute, ZeRO and offload.

Each is pinned, and the rest searched again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autopar.costmodel import Cluster
from autopar.errors import NoPlanFits, UsageError
from autopar.options.plan_options import requests_beside
from autopar.plan import Plan
from autopar.planning.model.progress import Progress
from autopar.planning.model.recompute import RECOMPUTES
from autopar.planning.model.request import OFFLOADS, ZEROS, Request
from autopar.planning.planner import fastest_plan
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
    free = partial(requests_beside, plan, analysis.graph, cluster, memory=memory)
    first = free()[0]
    searches = Searches(analysis.graph, first)
    # Made once, for all processes.
    _ = searches.folded
    fixed = list(_fixed(plan, analysis, first))

    def pinned(asked: tuple[str, str, dict[str, Any]]) -> Pinned:
        variable, value, pins = asked
        return _pinned(Pinned(variable=variable, value=value), partial(free, **pins), searches)

    rows = []
    for row in side_by_side(pinned, fixed):
        rows.append(row)
        if progress:
            progress(len(rows), len(fixed), f"{row.variable} {row.value}")
    return rows


def _pinned(row: Pinned, asked: Callable[[], list[Request]], searches: Searches) -> Pinned:
    """The best plan with a variable fixed to a value."""
    try:
        plan = fastest_plan(asked(), searches.plan)
    except NoPlanFits:
        return replace(row, why="does not fit the memory")
    except UsageError as error:
        return replace(row, why=str(error))
    named = scheme_of(plan, searches.folded.analysis(short=False)).called
    return replace(row, step=plan.predicted.step, memory=plan.predicted.memory, named=named)


def _fixed(
    plan: Plan, analysis: Analysis, free: Request
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The variables with the values to try.

    A count is tried at half and twice the plan's; of a choice, every value is tried.
    """
    stages = stages_of(plan)
    count = plan.schedule.micro_batches
    # A stage has at least one layer, and all stages have equally many devices.
    fits = [n for n in divisors(free.cluster.devices) if n <= layers_of(analysis)]
    for value in sorted({1, 2, stages // 2, stages * 2, stages} & {*fits}):
        yield "stages", str(value), {"stages": value}
    if not analysis.train:
        return
    for value in sorted({1, count // 2, count, count * 2} - {0}):
        yield "micro-batches", str(value), {"micro_batches": value}
    for mode in RECOMPUTES:
        yield "recompute", mode, {"recompute": mode}
    for zero in ZEROS:
        yield "ZeRO", str(zero), {"zero": zero}
    for offload in OFFLOADS if free.has_host else ():
        yield "offload", offload, {"offload": offload}
