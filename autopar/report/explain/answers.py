"""Answers about a plan as tables: other strategies, pins of the outer search, and flips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.analysis.searches.alternatives import Alternative
from autopar.analysis.searches.outer_choices import Pinned
from autopar.analysis.searches.sensitivity import Flip
from autopar.plan import Plan
from autopar.report.tables import Table
from autopar.units import bytes_text, seconds_text

if TYPE_CHECKING:
    pass

TOLD = 1e-6
"""The least change of the operators' own seconds to mention, as a share of the step."""


def alternatives_table(
    others: Sequence[Alternative],
    axes: Sequence[str],
    best: float,
    what: str = "operator were split",
) -> Table:
    """The other strategies of an operator, or layouts of a parameter, as a table.

    Each row has the best plan with it.

    `axes`: of the mesh. `best`: seconds of the plan. `what`: the condition, for the title.
    """
    rows = [_alternative_row(other, axes, best) for other in others]
    columns = (*axes, "means", ">step", ">change", "what makes the difference")
    title = f"The best plan if this {what} otherwise: everything else is solved again"
    return Table(title=title, columns=columns, rows=tuple(rows))


def _alternative_row(other: Alternative, axes: Sequence[str], best: float) -> tuple[str, ...]:
    words = ", ".join(dict.fromkeys(other.words.values())) + (
        " (as planned)" if other.planned else ""
    )
    strategy = tuple(other.strategy[axis] for axis in axes)
    if other.step is None or other.change is None:
        return (*strategy, words, other.why, "", "")
    told = []
    if abs(other.own) > TOLD * best:
        told.append(f"the operator itself {signed(other.own)}")
    if abs(other.others) > TOLD * best:
        told.append(f"other operators {signed(other.others)}")
    told += [
        f"{move.tensor} as {move.forced} instead of {move.best} {signed(move.seconds)}"
        for move in other.moves
    ]
    return (
        *strategy,
        words,
        seconds_text(other.step),
        f"{other.step / best - 1:+.2%}" if best else "",
        "; ".join(told),
    )


def signed(seconds: float) -> str:
    """Seconds with their sign."""
    return ("+" if seconds >= 0 else "-") + seconds_text(abs(seconds))


def pinned_table(pinned: Sequence[Pinned], plan: Plan) -> Table:
    """The best plans with one variable of the outer search fixed."""
    best = plan.predicted.step
    rows = []
    for p in pinned:
        if p.step is None:
            # There is no such plan: the reason stands in the place of its name.
            rows.append((p.variable, p.value, p.why, "", "", ""))
            continue
        change = f"{p.step / best - 1:+.2%}"
        rows.append(
            (p.variable, p.value, p.named, seconds_text(p.step), change, bytes_text(p.memory))
        )
    columns = ("variable", "fixed to", "best plan", ">step", ">change", ">memory")
    return Table(
        title="The best plan if one choice were fixed: everything else is searched again",
        columns=columns,
        rows=tuple(rows),
    )


def flips_table(flips: Sequence[Flip], base: str) -> Table:
    """The flips of the plan found without pins, named `base`."""
    rows = []
    for flip in flips:
        if flip.factor is None or flip.value is None:
            rows.append(
                (flip.quantity, flip.direction, f"stays to {flip.limit or 1.0:.3g}x", "", "", "")
            )
            continue
        value = (
            f"{flip.value:.0f}"
            if flip.quantity == "batch"
            else bytes_text(flip.value) + ("/s" if "bandwidth" in flip.quantity else "")
        )
        step = "" if flip.step is None else seconds_text(flip.step)
        rows.append(
            (flip.quantity, flip.direction, f"{flip.factor:.3g}x", value, flip.becomes, step)
        )
    columns = ("quantity", "scaled", ">flips at", ">value", "becomes", ">step")
    return Table(
        title=f"Where the plan found ({base}) becomes another, each figure scaled alone",
        columns=columns,
        rows=tuple(rows),
    )
