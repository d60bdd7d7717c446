"""Answers about a plan as tables: other strategies of an operator, pins of the outer search, and flips of the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autopar.costmodel import Cluster

from ..errors import UsageError
from ..ir import Graph
from ..plan import Plan
from ..planning.ranking import Progress
from ..planning.request import Request
from ..sharding.analysis import Analysis
from .outer_pins import Pinned, outer_alternatives
from .sensitivity import Flip, Sensitivity
from .tables import Table
from .units import bytes_text, seconds_text
from .why import Alternative, Why

if TYPE_CHECKING:
    from .explained import Explained

TOLD = 1e-6
"""The least change of the operators' own seconds to mention, as a share of the step."""


def alternatives_table(others: Sequence[Alternative], axes: Sequence[str], best: float, what: str = "operator were split") -> Table:
    """The strategies of an operator (or layouts of a parameter), each with the best plan that has it.

    `axes`: of the mesh. `best`: seconds of the plan. `what`: the condition, for the title.
    """
    rows = [_alternative_row(other, axes, best) for other in others]
    columns = (*axes, "means", ">step", ">change", "what makes the difference")
    title = f"The best plan if this {what} otherwise: everything else is solved again"
    return Table(title=title, columns=columns, rows=tuple(rows))


def _alternative_row(other: Alternative, axes: Sequence[str], best: float) -> tuple[str, ...]:
    words = ", ".join(dict.fromkeys(other.words.values())) + (" (as planned)" if other.planned else "")
    strategy = tuple(other.strategy[axis] for axis in axes)
    if other.step is None or other.change is None:
        return (*strategy, words, other.why, "", "")
    told = []
    if abs(other.own) > TOLD * best:
        told.append(f"the operator itself {signed(other.own)}")
    if abs(other.others) > TOLD * best:
        told.append(f"other operators {signed(other.others)}")
    told += [f"{move.tensor} as {move.forced} instead of {move.best} {signed(move.seconds)}" for move in other.moves]
    return (*strategy, words, seconds_text(other.step), f"{other.step / best - 1:+.2%}" if best else "", "; ".join(told))


def signed(seconds: float) -> str:
    """Seconds with their sign."""
    return ("+" if seconds >= 0 else "-") + seconds_text(abs(seconds))


def pinned_table(pinned: Sequence[Pinned], plan: Plan) -> Table:
    """The best plans with one variable of the outer search fixed."""
    best = plan.predicted.step
    rows = [
        (p.variable, p.value, p.why, "", "", "")
        if p.step is None
        else (p.variable, p.value, p.named, seconds_text(p.step), f"{p.step / best - 1:+.2%}", bytes_text(p.memory))
        for p in pinned
    ]
    columns = ("variable", "fixed to", "best plan", ">step", ">change", ">memory")
    return Table(title="The best plan if one choice were fixed: everything else is searched again", columns=columns, rows=tuple(rows))


def flips_table(flips: Sequence[Flip], base: str) -> Table:
    """The flips of the plan found without pins, named `base`."""
    rows = []
    for flip in flips:
        if flip.factor is None or flip.value is None:
            rows.append((flip.quantity, flip.direction, f"stays to {flip.limit or 1.0:.3g}x", "", "", ""))
            continue
        value = f"{flip.value:.0f}" if flip.quantity == "batch" else bytes_text(flip.value) + ("/s" if "bandwidth" in flip.quantity else "")
        step = "" if flip.step is None else seconds_text(flip.step)
        rows.append((flip.quantity, flip.direction, f"{flip.factor:.3g}x", value, flip.becomes, step))
    columns = ("quantity", "scaled", ">flips at", ">value", "becomes", ">step")
    return Table(title=f"Where the plan found ({base}) becomes another, each figure scaled alone", columns=columns, rows=tuple(rows))


def answered(
    found: Explained,
    cluster: Cluster,
    progress: Progress,
    *,
    alternatives: bool,
    memory: float | None,
    batches: Callable[[int], Graph] | None = None,
) -> Explained:
    """The answers with a plan's alternatives, and its sensitivity if `batches` gives the model for other batches."""
    assert found.analysis is not None
    plan, analysis = found.plan, found.analysis
    if alternatives and found.names is None:
        pinned = outer_alternatives(plan, analysis, cluster, memory=memory, progress=progress)
        found = dataclasses.replace(found, pinned=tuple(pinned))
    elif alternatives and not found.parameter:
        if found.names is None or len(found.names) != 1:
            raise UsageError(f"--alternatives needs one operator, or none; OP names {len(found.names or ())}")
        why = Why(plan, analysis, cluster, memory=memory)
        found = dataclasses.replace(found, others=tuple(why.alternatives(found.names[0], progress)), step=plan.predicted.step)
    if batches is not None:
        sensitivity = sensitivity_of(plan, analysis, cluster, memory=memory, batches=batches)
        found = dataclasses.replace(found, flips=tuple(sensitivity.flips(progress)), base=sensitivity.base)
    return found


def sensitivity_of(
    plan: Plan, analysis: Analysis, cluster: Cluster, *, memory: float | None, batches: Callable[[int], Graph]
) -> Sensitivity:
    """The sensitivity of the model's best plan without pins."""
    request = Request(
        cluster=cluster, train=analysis.train, optimizer=plan.model.optimizer, memory=memory, uniform=True, types=plan.schedule.types,
    )  # fmt: skip
    sizes = [spec.shape[0] for spec in plan.model.inputs.values() if spec.shape]
    return Sensitivity(plan, analysis.graph, request, batch=sizes[0] if sizes else 0, batches=batches)
