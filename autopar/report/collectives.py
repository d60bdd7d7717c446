"""The collectives of a step as tables and as one object: by axis and level, and, with the model at hand, by operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..plan import Plan
from ..sharding.program import Collective
from .account import Account
from .grouping import groups_of
from .page.exchanges import Total, issued_by, levels_of, totals
from .page.section import share
from .page.traffic import axes_table, counted, is_whole, totals_of
from .tables import Table
from .units import bytes_text, seconds_text
from .words import COLLECTIVES

PARAMETERS = "(parameters)"
"""The row of what units issue, which several operators share."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """Operators that are split alike, folded over layers, and the collectives of one step that belong to them."""

    name: str
    operators: tuple[str, ...]
    totals: tuple[Total, ...]


def issuers(account: Account) -> Iterator[Issuer]:
    """All that communicate, in the order of the operators; the units of parameters last."""
    accounts = {one.operator.name: one for one in account.operators}
    for group in groups_of(account):
        found = _totals(account, [pair for name in group.operators for pair in accounts[name].collectives])
        if found:
            yield Issuer(name=group.name, operators=tuple(group.operators), totals=found)
    found = _totals(account, [pair for unit in account.units for pair in unit.collectives])
    if found:
        yield Issuer(name=PARAMETERS, operators=(), totals=found)


def _totals(account: Account, pairs: list[tuple[Collective, float]]) -> tuple[Total, ...]:
    return tuple(totals((account.axes[c.axis], c.phase, c.kind, c.nbytes, seconds) for c, seconds in pairs))


def collectives_parts(plan: Plan, account: Account | None) -> list[str | Table]:
    """Sentences and tables, in the order of printing."""
    parts: list[str | Table] = [counted(plan, account), _hidden(plan)]
    parts += ["What stages hand on to one another comes beside."] if plan.stages else []
    parts.append(axes_table(plan, totals_of(issued_by(plan, account))))
    return [*parts, *([_operators(account)] if account is not None else [])]


def _hidden(plan: Plan) -> str:
    """How much of the communication runs under computation: of the whole step, for no plan file tells it of each collective."""
    p = plan.predicted
    if p.communication <= 0:
        return "Nothing is communicated within a stage." if plan.stages else "Nothing is communicated."
    of = " of the slowest stage" if plan.stages else ""
    hidden = f"{seconds_text(p.overlapped)} ({share(p.overlapped, p.communication)})"
    return f"Of the {seconds_text(p.communication)} of communication{of}, {hidden} are hidden under computation."


def _operators(account: Account) -> Table:
    rows = []
    for issuer in issuers(account):
        name, number = issuer.name, str(len(issuer.operators) or "")
        for one in issuer.totals:
            figures = (str(one.times), bytes_text(one.nbytes), seconds_text(one.seconds))
            rows.append((name, number, one.phase, f"{COLLECTIVES.get(one.kind, one.kind)} over {one.axis}", *figures))
            name, number = "", ""
    columns = ("operators", ">ops", "phase", "collective", ">times", ">bytes", ">seconds")
    return Table(title="Collectives by operator", columns=columns, rows=tuple(rows))


def collectives_json(plan: Plan, account: Account | None) -> dict[str, Any]:
    """The same as one object: seconds and bytes. `of`: what is counted."""
    levels, summed, p = levels_of(plan), totals_of(issued_by(plan, account)), plan.predicted
    found: dict[str, Any] = {
        "of": "step" if is_whole(plan, account) else "micro-batch",
        "communication": p.communication,
        "hidden": p.overlapped,
        "totals": [{"level": levels.get(one.axis, ""), **dataclasses.asdict(one)} for one in summed],
    }
    if account is not None:
        found["operators"] = [dataclasses.asdict(issuer) for issuer in issuers(account)]
    return found
