"""The collectives of a step as tables and as one object.

They are by axis and level and, if the model is given, by operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.analysis.program.account import Account
from autopar.analysis.program.equal_layers import groups_of
from autopar.analysis.program.exchanges import Total, issued_by, levels_of, totals
from autopar.analysis.program.hiding import Hidden
from autopar.analysis.program.strategy_words import COLLECTIVES
from autopar.plan import Plan
from autopar.report.page.section import share
from autopar.report.page.traffic import axes_table, counted, is_whole, totals_of
from autopar.report.tables import Table
from autopar.sharding.program import Collective
from autopar.units import bytes_text, seconds_text

MATRICES = "(matrices)"
"""The row of the collectives by which owners of matrices update them."""
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
    groups += [(PARAMETERS, ()), (MATRICES, ())]
    pairs += [account.shared, list(account.updates)]
    for (name, names), issued in zip(groups, pairs, strict=True):
        sums = tuple(
            totals(
                (account.over(c.axes), c.phase, c.kind, c.nbytes, seconds) for c, seconds in issued
            )
        )
        if sums:
            shares = tuple(_share(hidden, one, account, issued) for one in sums)
            yield Issuer(name=name, operators=names, totals=sums, hidden=shares)


def _share(
    hidden: Hidden | None,
    total: Total,
    account: Account,
    issued: Sequence[tuple[Collective, float]],
) -> float | None:
    """The hidden share of a total."""
    if hidden is None:
        return None
    own = (total.axis, total.phase, total.kind)
    return hidden.share(
        (c for c, _ in issued if (account.over(c.axes), c.phase, c.kind) == own), account.over
    )


def collectives_parts(
    plan: Plan, account: Account | None, hidden: Hidden | None = None
) -> list[str | Table]:
    """Sentences and tables, in the order of printing."""
    parts: list[str | Table] = [counted(plan, account), _hidden(plan)]
    if plan.stages:
        parts.append("What stages hand on to one another comes beside.")
    parts.append(axes_table(plan, totals_of(issued_by(plan, account)), hidden))
    return [*parts, *([_operators(account, hidden)] if account is not None else [])]


def _hidden(plan: Plan) -> str:
    """The hidden share of the whole step's communication, in words."""
    p = plan.predicted
    if p.communication <= 0:
        return (
            "Nothing is communicated within a stage." if plan.stages else "Nothing is communicated."
        )
    of = " of the slowest stage" if plan.stages else ""
    hidden = f"{seconds_text(p.overlapped)} ({share(p.overlapped, p.communication)})"
    return (
        f"Of the {seconds_text(p.communication)} of communication{of}, {hidden} are hidden under "
        "computation."
    )


def _operators(account: Account, hidden: Hidden | None) -> Table:
    rows: list[tuple[str, ...]] = []
    for issuer in issuers(account, hidden):
        name = issuer.name
        number = str(len(issuer.operators) or "")
        for one, part in zip(issuer.totals, issuer.hidden, strict=True):
            figures = (
                str(one.times),
                bytes_text(one.nbytes),
                seconds_text(one.seconds),
                "" if part is None else f"{part:.0%}",
            )
            rows.append(
                (
                    name,
                    number,
                    one.phase,
                    f"{COLLECTIVES.get(one.kind, one.kind)} over {one.axis}",
                    *figures,
                )
            )
            name = ""
            number = ""
    columns: tuple[str, ...] = (
        "operators",
        ">ops",
        "phase",
        "collective",
        ">times",
        ">bytes",
        ">seconds",
        ">hidden",
    )
    if hidden is None:
        columns = columns[:-1]
        rows = [row[:-1] for row in rows]
    return Table(title="Collectives by operator", columns=columns, rows=tuple(rows))


def collectives_json(
    plan: Plan, account: Account | None, hidden: Hidden | None = None
) -> dict[str, Any]:
    """The collectives as one object: seconds and bytes.

    Its key `of` says which collectives are counted.
    """
    summed = totals_of(issued_by(plan, account))
    p = plan.predicted
    levels = levels_of(plan, summed)
    answer: dict[str, Any] = {
        "of": "step" if is_whole(plan, account) else "micro-batch",
        "communication": p.communication,
        "hidden": p.overlapped,
        "totals": [
            {"level": levels.get(one.axis, ""), **dataclasses.asdict(one)} for one in summed
        ],
    }
    if account is not None:
        answer["operators"] = [dataclasses.asdict(issuer) for issuer in issuers(account, hidden)]
    return answer
