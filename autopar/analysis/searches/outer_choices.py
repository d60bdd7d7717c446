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
from autopar.planning.planner import folded_of, search_plan
from autopar.planning.space.candidates import divisors
from autopar.schemes import scheme_of, stages_of
from autopar.schemes.known import layers_of
from autopar.sharding.analysis import Analysis


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
    pinned = []
    folded = folded_of(analysis.graph, free)
    for number, (variable, value, request) in enumerate(requests):
        if progress:
            progress(number, len(requests), f"{variable} {value}")
        try:
            other = search_plan(analysis.graph, request, folded=folded)
        except NoPlanFits:
            pinned.append(Pinned(variable=variable, value=value, why="does not fit the memory"))
        except UsageError as error:
            pinned.append(Pinned(variable=variable, value=value, why=str(error)))
        else:
            named = scheme_of(other, analysis).called
            figures = other.predicted
            pinned.append(
                Pinned(
                    variable=variable,
                    value=value,
                    step=figures.step,
                    memory=figures.memory,
                    named=named,
                )
            )
    return pinned


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
