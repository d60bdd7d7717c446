"""The output of `autopar plan`: cluster, figures, operators by layer, known schemes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from autopar.analysis.program.account import Account, account_of, has_account
from autopar.analysis.program.equal_layers import Group, groups_of
from autopar.analysis.program.strategy_words import idle_axes
from autopar.analysis.program.throughput import Budget
from autopar.analysis.program.unequal_layers import unequal_lines
from autopar.analysis.searches.rivals import LONG, MAX_OPERATORS, SHARE, SHORT, Rival, rivals
from autopar.api import Planned
from autopar.plan import Plan
from autopar.planning.model.request import HEADROOM, default_limit
from autopar.schemes import Named, scheme_of, stages_of
from autopar.sharding.analysis import Analysis
from autopar.units import bytes_text

from .certainty import certainty_json, certainty_lines, fits_surely, memory_to_ask
from .comparison import comparison_table
from .frameworks import repriced, repriced_lines
from .stages import stages_table, where_line
from .tables import Table, operators_table, summary_lines
from .throughput import speed_json, warning_lines


def _account(planned: Planned) -> tuple[Account | None, Analysis, Named]:
    analysis = planned.analysis
    account = (
        account_of(planned.plan, analysis, planned.cluster) if has_account(planned.plan) else None
    )
    return account, analysis, scheme_of(planned.plan, analysis)


def _rivals(
    planned: Planned, analysis: Analysis, *, compare: bool | None, memory: float | None
) -> list[Rival]:
    """The known schemes, if requested.

    With `compare` None they are priced after a long search, each within a share of its time.
    """
    quick = compare is None and planned.seconds < LONG
    if compare is False or quick or planned.plan.devices == 1 or len(analysis.warm) > MAX_OPERATORS:
        return []
    return rivals(
        planned, SHORT, memory=memory, seconds=None if compare else SHARE * planned.seconds
    )


def cluster_sentence(planned: Planned) -> str:
    """A sentence with the cluster that the plan assumes."""
    return f"{planned.notes[0]}; {planned.cluster.inventory}"


def limit_line(planned: Planned, memory: float | None) -> str:
    """A line with the bytes of a device that the plan was allowed to fill."""
    if memory is not None:
        return f"memory limit {bytes_text(memory)} per device, as given"
    # Every device holds its part of the plan, so the smallest one sets the limit.
    device = min(
        (pool.device for pool in planned.cluster.pools), key=lambda device: device.usable_memory
    )
    left = (
        f"{HEADROOM:.0%} of the {bytes_text(device.usable_memory)} of {device.name} are left to "
        "the allocator"
    )
    surely = memory_to_ask(planned.cluster)
    tight = not fits_surely(planned.plan.predicted.memory, planned.cluster)
    how = f": {surely} asks for a plan that fits in 95% of runs" if tight else ""
    return (
        f"memory limit {bytes_text((1 - HEADROOM) * device.usable_memory)} per device: {left} "
        f"(--memory overrules it{how})"
    )


def planned_parts(
    planned: Planned,
    *,
    compare: bool | None,
    memory: float | None,
    saved: str | None,
    budget: Budget | None = None,
) -> list[str | Table]:
    """Sentences and tables, in the order of printing."""
    account, analysis, named = _account(planned)
    said = summary_lines(planned.plan, cluster_sentence(planned), named, planned.cluster, budget)
    sure = certainty_lines(planned.plan, planned.cluster)
    # A plan that is loaded may have been made for another framework.
    step = repriced(planned.plan, analysis, planned.cluster)
    said += repriced_lines(planned.plan, step, planned.cluster)
    # The table of operators may be hundreds of lines long, so the sentences stand before it.
    parts: list[str | Table] = [
        *said,
        *sure,
        limit_line(planned, memory),
        where_line(planned.plan),
        *planned.notes[1:],
    ]
    parts += unequal_lines(planned.plan, analysis)
    if planned.plan.stages:
        parts.append(stages_table(planned.plan))
    if account is not None:
        parts += [
            f"nothing is split on axis {axis}: its devices repeat each other's work"
            for axis in idle_axes(account)
        ]
        parts.append(operators_table(groups_of(account), account))
    compared = _rivals(planned, analysis, compare=compare, memory=memory)
    if compared:
        parts.append(
            comparison_table(planned.plan, named.called, compared, planned.cluster, budget)
        )
        parts += faster_lines(planned.plan, compared)
    elif compare is not False and planned.plan.devices > 1:
        parts.append(
            "\nthe known schemes are not priced here: --compare prices two of them beside the "
            "plan, autopar compare all"
        )
    return [*parts, saved_line(saved)]


def saved_line(saved: str | None) -> str:
    """A line with the file of the plan, or the way to get one."""
    if saved:
        return f"\nsaved to {saved}"
    return "\nnot saved: give -o FILE to keep the plan"


def faster_lines(plan: Plan, rivals: Iterable[Rival]) -> list[str]:
    """Sentences about rivals with a faster prediction; only a search with a gap can leave any."""
    # Equal plans may differ in their last digits, since their seconds are summed in another order.
    faster = [
        r
        for r in rivals
        if r.fits and r.step is not None and r.step < plan.predicted.step * (1 - 1e-9)
    ]
    return [
        f"{r.name} is predicted to be faster than the plan found: --scheme {r.scheme} plans it"
        for r in faster
    ]


def planned_json(
    planned: Planned,
    *,
    compare: bool | None,
    memory: float | None,
    saved: str | None,
    budget: Budget | None = None,
) -> dict[str, Any]:
    """The output as one object: seconds and bytes."""
    account, analysis, named = _account(planned)
    plan = planned.plan
    return {
        "summary": {
            "cluster": planned.cluster.name,
            "framework": plan.framework,
            "assumed": cluster_sentence(planned),
            "notes": list(planned.notes[1:]),
            "devices": plan.devices,
            "unused": plan.unused,
            "stages": stages_of(plan),
            "micro_batches": plan.schedule.micro_batches,
            "recomputed": sum(map(len, plan.schedule.recompute)),
            "mesh": {axis.name: axis.size for axis in plan.mesh},
            "scheme": named.scheme,
            "recipe": named.recipe,
            "sentence": named.sentence,
            "schemes": dict(named.axes),
            "idle": idle_axes(account) if account else [],
            "step": plan.predicted.step,
            "communication": plan.predicted.communication,
            "overlapped": plan.predicted.overlapped,
            "bubble": plan.predicted.bubble,
            "memory": plan.predicted.memory,
            "host_memory": plan.predicted.host_memory,
            "memory_limit": memory
            if memory is not None
            else min(default_limit(pool) for pool in planned.cluster.pools),
            "gap": plan.provenance.gap,
            **certainty_json(plan, planned.cluster),
            **speed_json(plan, planned.cluster, budget),
            "warnings": warning_lines(plan),
            "operators": [group_json(group) for group in (groups_of(account) if account else ())],
            "rivals": [
                dataclasses.asdict(rival)
                for rival in _rivals(planned, analysis, compare=compare, memory=memory)
            ],
            "saved": saved,
        },
        "plan": plan.model_dump(mode="json", by_alias=True),
    }


def group_json(group: Group) -> dict[str, Any]:
    """A row of the table of operators."""
    return {
        "name": group.name,
        "operators": group.operators,
        "strategy": group.strategy,
        "collectives": dict(sorted(group.collectives.items())),
        "bytes": group.nbytes,
        "seconds": group.seconds,
    }
