"""The collectives of a step as tables and as one object: by axis and level, and, if the model is given, by operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ..plan import Plan
from ..sharding.program import Collective
from .account import Account
from .grouping import groups_of
from .hiding import Hidden
from .page.exchanges import Total, issued_by, levels_of, totals
from .page.section import share
from .page.traffic import axes_table, counted, is_whole, totals_of
from .tables import Table
from .units import bytes_text, seconds_text
from .words import COLLECTIVES

PARAMETERS = "(parameters)"
"""The row of the units' collectives, which several operators share."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """Operators with equal splits, folded over layers, and their collectives of one step.

    `hidden`: for each total, the share that runs under computation (None: not known).
    """

    name: str
    operators: tuple[str, ...]
    totals: tuple[Total, ...]
    hidden: tuple[float | None, ...]


def issuers(account: Account, hidden: Hidden | None) -> Iterator[Issuer]:
    """All operators that communicate, in order; the units of parameters last."""
    accounts = {one.operator.name: one for one in account.operators}
    groups = [(group.name, tuple(group.operators)) for group in groups_of(account)]
    pairs = [[pair for name in names for pair in accounts[name].collectives] for _, names in groups]
    units = [pair for unit in account.units for pair in unit.collectives]
    for (name, names), issued in zip([*groups, (PARAMETERS, ())], [*pairs, units], strict=True):
        found = tuple(totals((account.over(c.axes), c.phase, c.kind, c.nbytes, seconds) for c, seconds in issued))
        if found:
            shares = tuple(_share(hidden, one, account, issued) for one in found)
            yield Issuer(name=name, operators=names, totals=found, hidden=shares)


def _share(hidden: Hidden | None, total: Total, account: Account, issued: Sequence[tuple[Collective, float]]) -> float | None:
    """The hidden share of a total."""
    if hidden is None:
        return None
    own = (total.axis, total.phase, total.kind)
    return hidden.share((c for c, _ in issued if (account.over(c.axes), c.phase, c.kind) == own), account.over)


def collectives_parts(plan: Plan, account: Account | None, hidden: Hidden | None = None) -> list[str | Table]:
    """Sentences and tables, in the order of printing."""
    parts: list[str | Table] = [counted(plan, account), _hidden(plan)]
    parts += ["What stages hand on to one another comes beside."] if plan.stages else []
    parts.append(axes_table(plan, totals_of(issued_by(plan, account)), hidden))
    return [*parts, *([_operators(account, hidden)] if account is not None else [])]


def _hidden(plan: Plan) -> str:
    """The hidden share of the whole step's communication, in words."""
    p = plan.predicted
    if p.communication <= 0:
        return "Nothing is communicated within a stage." if plan.stages else "Nothing is communicated."
    of = " of the slowest stage" if plan.stages else ""
    hidden = f"{seconds_text(p.overlapped)} ({share(p.overlapped, p.communication)})"
    return f"Of the {seconds_text(p.communication)} of communication{of}, {hidden} are hidden under computation."


def _operators(account: Account, hidden: Hidden | None) -> Table:
    rows: list[tuple[str, ...]] = []
    for issuer in issuers(account, hidden):
        name, number = issuer.name, str(len(issuer.operators) or "")
        for one, part in zip(issuer.totals, issuer.hidden, strict=True):
            figures = (str(one.times), bytes_text(one.nbytes), seconds_text(one.seconds), "" if part is None else f"{part:.0%}")
            rows.append((name, number, one.phase, f"{COLLECTIVES.get(one.kind, one.kind)} over {one.axis}", *figures))
            name, number = "", ""
    columns: tuple[str, ...] = ("operators", ">ops", "phase", "collective", ">times", ">bytes", ">seconds", ">hidden")
    if hidden is None:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table(title="Collectives by operator", columns=columns, rows=tuple(rows))


def collectives_json(plan: Plan, account: Account | None, hidden: Hidden | None = None) -> dict[str, Any]:
    """The collectives as one object: seconds and bytes. Its key `of`: which collectives are counted."""
    summed, p = totals_of(issued_by(plan, account)), plan.predicted
    levels = levels_of(plan, summed)
    found: dict[str, Any] = {
        "of": "step" if is_whole(plan, account) else "micro-batch",
        "communication": p.communication,
        "hidden": p.overlapped,
        "totals": [{"level": levels.get(one.axis, ""), **dataclasses.asdict(one)} for one in summed],
    }
    if account is not None:
        found["operators"] = [dataclasses.asdict(issuer) for issuer in issuers(account, hidden)]
    return found
