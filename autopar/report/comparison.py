"""The plan found beside the best plans of known schemes, as tables and as one object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from autopar.analysis.program.throughput import Budget, cost_of, throughput_of
from autopar.analysis.searches.rivals import Rival, rival_of
from autopar.api import Planned
from autopar.costmodel import Cluster
from autopar.plan import Plan
from autopar.report.certainty import certainty_json, certainty_lines
from autopar.report.printing import Table
from autopar.report.tables import scheme_line, summary_lines
from autopar.report.throughput import share_text, speed_json, unit_of
from autopar.schemes import SCHEMES, scheme_named, scheme_of
from autopar.sharding.analysis import analyse
from autopar.units import amount_text, bytes_text, seconds_text


def comparison_table(
    plan: Plan,
    named: str,
    rivals: Sequence[Rival],
    cluster: Cluster | None = None,
    budget: Budget | None = None,
) -> Table:
    """The plan found next to the known schemes, the fastest of them first.

    `cluster`: for MFU. `budget`: the run whose device hours, and price, are asked about.
    """
    ranked = sorted(rivals, key=lambda r: (r.step is None, not r.fits, r.step or 0.0))
    beside = _Beside(plan, cluster, budget)
    rows = tuple(beside.row(rival) for rival in (rival_of("", plan, named), *ranked))
    columns = ("scheme", "mesh", ">step", ">ratio", *beside.columns, ">memory", "")
    title = f"Beside known schemes; {beside.counted} a second of one {unit_of(cluster)}"
    return Table(title=title, columns=columns, rows=rows)


class _Beside:
    """Rows of schemes, with their speed and cost."""

    def __init__(self, plan: Plan, cluster: Cluster | None, budget: Budget | None) -> None:
        self.plan = plan
        self.cluster = cluster
        self.budget = budget if budget is not None and (budget.tokens or budget.price) else None
        speed = throughput_of(plan, cluster)
        self.counted = "tokens" if speed.tokens else "samples"
        self.has_mfu = speed.mfu is not None
        self.columns = (
            f">{self.counted}/s",
            *((">MFU",) if self.has_mfu else ()),
            *((f">{unit_of(cluster)} hours",) if self.budget else ()),
            *((">price",) if self.budget and self.budget.price else ()),
        )

    def row(self, rival: Rival) -> tuple[str, ...]:
        """The cells of a scheme."""
        if rival.step is None:
            why = "takes long: autopar compare prices it" if rival.late else _impossible(rival)
            return (rival.label, *[""] * (4 + len(self.columns)), why)
        return (
            rival.label,
            rival.mesh,
            seconds_text(rival.step),
            f"{rival.step / self.plan.predicted.step:.2f}x",
            *self.figures(rival.step),
            bytes_text(rival.memory),
            _remarks(rival),
        )

    def figures(self, step: float) -> list[str]:
        """Speed, MFU and cost of a step of so many seconds."""
        speed = throughput_of(self.plan, self.cluster, step)
        cells = [amount_text(getattr(speed, f"{self.counted}_per_second") / speed.devices)]
        if self.has_mfu:
            cells.append(share_text(speed.mfu or 0.0))
        if self.budget is not None:
            cost = cost_of(speed, self.budget)
            cells.append(amount_text(cost.device_hours))
            if cost.money is not None:
                cells.append(amount_text(cost.money))
        return cells


def _impossible(rival: Rival) -> str:
    return f"impossible: {rival.why}"


def _remarks(rival: Rival) -> str:
    remarks = [] if rival.fits else ["does not fit"]
    if rival.named not in ("", rival.scheme):
        remarks.append(f"is {rival.named}")
    if rival.host_memory:
        remarks.append(f"and {bytes_text(rival.host_memory)} in host memory")
    return ", ".join(remarks)


def compared_parts(
    planned: Planned,
    rivals: Sequence[Rival],
    sentence: str,
    *,
    named: bool = False,
    budget: Budget | None = None,
) -> list[str | Table]:
    """The output of `autopar compare`.

    Impossible schemes share a line unless the user `named` them.
    """
    absent = [] if named else [rival for rival in rivals if rival.step is None]
    rivals = [rival for rival in rivals if rival not in absent]
    analysis = analyse(planned.model.graph, train=planned.plan.model.mode == "train")
    called = scheme_of(planned.plan, analysis)
    return [
        *summary_lines(planned.plan, sentence, None, planned.cluster, budget),
        *certainty_lines(planned.plan, planned.cluster),
        scheme_line(called),
        comparison_table(planned.plan, called.called, rivals, planned.cluster, budget),
        *([_absent_line(absent)] if absent else []),
    ]


def _absent_line(absent: Sequence[Rival]) -> str:
    """A line with the schemes that are impossible here, each with its reason."""
    return "\nimpossible here: " + "; ".join(f"{rival.name} ({rival.why})" for rival in absent)


def compared_json(
    planned: Planned, rivals: Sequence[Rival], budget: Budget | None = None
) -> dict[str, Any]:
    """The comparison as one object: seconds and bytes; `ratio`: to the step of the plan found."""
    analysis = analyse(planned.model.graph, train=planned.plan.model.mode == "train")
    named = scheme_of(planned.plan, analysis)
    rows = (rival_of("", planned.plan, named.called), *rivals)
    return {
        "cluster": planned.cluster.name,
        "framework": planned.plan.framework,
        "devices": planned.cluster.devices,
        "model": planned.plan.model.name,
        "scheme": named.scheme,
        "recipe": named.recipe,
        **certainty_json(planned.plan, planned.cluster),
        **speed_json(planned.plan, planned.cluster, budget),
        "rows": [_row_json(row, planned, budget) for row in rows],
        "words": {r.scheme: scheme_named(r.scheme).words for r in rivals if r.scheme in SCHEMES},
    }


def _row_json(row: Rival, planned: Planned, budget: Budget | None) -> dict[str, Any]:
    """A row with its speed and cost."""
    said = dataclasses.asdict(row) | {"scheme": row.name, "recipe": row.recipe, "ratio": None}
    if row.step is None:
        return said
    speed = throughput_of(planned.plan, planned.cluster, row.step)
    said |= {
        "ratio": row.step / planned.plan.predicted.step,
        "tokens_per_second_per_device": speed.tokens_per_second / speed.devices or None,
        "mfu": speed.mfu,
    }
    if budget is not None and (budget.tokens or budget.price):
        cost = cost_of(speed, budget)
        said |= {"device_hours": cost.device_hours, "money": cost.money}
    return said
