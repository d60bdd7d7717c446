"""The output of `autopar plan`: the assumed cluster, the figures, the operators by layer, and the known schemes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ..api import Planned
from ..plan import Plan
from ..planning.request import HEADROOM, default_limit
from ..schemes import Named, scheme_of, stages_of
from ..sharding.analysis import Analysis, analyse
from .account import Account, account_of, has_account
from .certainty import certainty_json, certainty_lines
from .compare import LONG, MAX_OPERATORS, SHARE, SHORT, rivals
from .grouping import Group, groups_of
from .stages import stages_table, where_line
from .tables import Rival, Table, comparison_table, operators_table, summary_lines
from .unequal import unequal_lines
from .units import bytes_text
from .words import idle_axes


def _account(planned: Planned) -> tuple[Account | None, Analysis, Named]:
    analysis = planned.analysis or analyse(planned.model.graph, train=planned.plan.model.mode == "train")
    account = account_of(planned.plan, analysis, planned.cluster) if has_account(planned.plan) else None
    return account, analysis, scheme_of(planned.plan, analysis)


def _rivals(planned: Planned, analysis: Analysis, *, compare: bool | None, memory: float | None) -> list[Rival]:
    """The known schemes, if requested; with `compare` None, after a long search, each within a share of its time."""
    quick = compare is None and planned.seconds < LONG
    if compare is False or quick or planned.plan.devices == 1 or len(analysis.warm) > MAX_OPERATORS:
        return []
    return rivals(planned, SHORT, memory=memory, seconds=None if compare else SHARE * planned.seconds)


def cluster_sentence(planned: Planned) -> str:
    """A sentence with the cluster that the plan assumes."""
    return f"{planned.notes[0]}; {planned.cluster.inventory}"


def limit_line(planned: Planned, memory: float | None) -> str:
    """A line with the bytes of a device that the plan was allowed to fill."""
    if memory is not None:
        return f"memory limit {bytes_text(memory)} per device, as given"
    device = min((pool.device for pool in planned.cluster.pools), key=lambda device: device.usable_memory)
    left = f"{HEADROOM:.0%} of the {bytes_text(device.usable_memory)} of {device.name} are left to the allocator"
    return f"memory limit {bytes_text((1 - HEADROOM) * device.usable_memory)} per device: {left} (--memory overrules it)"


def planned_parts(planned: Planned, *, compare: bool | None, memory: float | None, saved: str | None) -> list[str | Table]:
    """Sentences and tables, in the order of printing."""
    account, analysis, named = _account(planned)
    said = summary_lines(planned.plan, cluster_sentence(planned), named)
    sure = certainty_lines(planned.plan, planned.cluster)
    parts: list[str | Table] = [*said, *sure, limit_line(planned, memory), where_line(planned.plan), *planned.notes[1:]]
    parts += unequal_lines(planned.plan, analysis)
    parts += [stages_table(planned.plan)] if planned.plan.stages else []
    if account is not None:
        parts += [f"nothing is split on axis {axis}: its devices repeat each other's work" for axis in idle_axes(account)]
        parts.append(operators_table(groups_of(account), account))
    found = _rivals(planned, analysis, compare=compare, memory=memory)
    if found:
        parts.append(comparison_table(planned.plan, named.called, found))
        parts += faster_lines(planned.plan, found)
    elif compare is not False and planned.plan.devices > 1:
        parts.append("\nthe known schemes are not priced here: --compare prices two of them beside the plan, autopar compare all")
    parts.append("\n" + (f"saved to {saved}" if saved else "not saved: give -o FILE to keep the plan"))
    return parts


def faster_lines(plan: Plan, found: Iterable[Rival]) -> list[str]:
    """Sentences about rivals with a faster prediction; only a search with a gap can leave any."""
    faster = [r for r in found if r.fits and r.step is not None and r.step < plan.predicted.step * (1 - 1e-9)]
    return [f"{r.name} is predicted to be faster than the plan found: --scheme {r.scheme} plans it" for r in faster]


def planned_json(planned: Planned, *, compare: bool | None, memory: float | None, saved: str | None) -> dict[str, Any]:
    """The output as one object: seconds and bytes."""
    account, analysis, named = _account(planned)
    plan = planned.plan
    return {
        "summary": {
            "cluster": planned.cluster.name,
            "assumed": cluster_sentence(planned),
            "notes": list(planned.notes[1:]),
            "devices": plan.devices,
            "unused": plan.unused,
            "stages": stages_of(plan),
            "micro_batches": plan.schedule.micro_batches,
            "recomputed": sum(map(len, plan.schedule.recompute)),
            "mesh": {axis.name: axis.size for axis in plan.mesh},
            "scheme": named.scheme,
            "sentence": named.sentence,
            "schemes": dict(named.axes),
            "idle": idle_axes(account) if account else [],
            "step": plan.predicted.step,
            "communication": plan.predicted.communication,
            "overlapped": plan.predicted.overlapped,
            "bubble": plan.predicted.bubble,
            "memory": plan.predicted.memory,
            "host_memory": plan.predicted.host_memory,
            "memory_limit": memory if memory is not None else min(default_limit(pool) for pool in planned.cluster.pools),
            "gap": plan.provenance.gap,
            **certainty_json(plan, planned.cluster),
            "operators": [group_json(group) for group in (groups_of(account) if account else ())],
            "rivals": [dataclasses.asdict(rival) for rival in _rivals(planned, analysis, compare=compare, memory=memory)],
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
