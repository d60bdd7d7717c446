"""The differences of two plans: figures side by side, other strategies and storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.analysis.program.layer_names import folded
from autopar.plan import Plan
from autopar.report.explain.operators import BARE
from autopar.report.tables import Table
from autopar.schemes import stages_of
from autopar.units import bytes_text, seconds_text

from .drawing import Bar, bars
from .section import Section, shortened
from .shapes import Picture

GATHERED = {"per_step": "kept", "per_pass": "again"}
"""Words for how long gathered parameters stay whole."""
_SECONDS = ("step", "forward", "backward", "update", "communication", "overlapped", "bubble")


def difference(plan: Plan, other: Plan) -> Section:
    """The section of the differences."""
    told = tuple(difference_lines(plan, other))
    tables = tuple(map(shortened, difference_tables(plan, other)))
    return Section(
        anchor="difference",
        title="Beside the other plan",
        told=told,
        pictures=tuple(_bars(plan, other)),
        tables=tables,
    )


def difference_lines(plan: Plan, other: Plan) -> list[str]:
    """Sentences on the other plan's figures, and on whether the plans can be compared."""
    here = plan.predicted
    there = other.predicted
    told = []
    if here.step > 0 and here.memory > 0:
        told = [
            f"The other plan's step takes {there.step / here.step:.2f} times as long, and needs "
            f"{there.memory / here.memory:.2f} times the "
            f"memory of this one's."
        ]
    if plan.model.fingerprint != other.model.fingerprint:
        told.append(
            "They are of different models (or of one with other sizes), so that most operators "
            "differ."
        )
    return told


def _bars(plan: Plan, other: Plan) -> Iterator[Picture]:
    pairs = (("this plan", plan.predicted), ("other plan", other.predicted))
    rows = []
    for name, p in pairs:
        exposed = max(p.communication - p.overlapped, 0.0)
        parts = (
            ("forward", p.forward),
            ("backward", p.backward),
            ("update", p.update),
            ("communication", exposed),
            ("bubble", p.bubble),
        )
        held = tuple((word, seconds, seconds_text(seconds)) for word, seconds in parts if seconds)
        rows.append(Bar(name=name, parts=held, text=seconds_text(p.step)))
    yield bars(
        rows,
        "Parts of the step of both plans: computing, updating, communication that nothing hides, "
        "bubble",
    )
    rows = [
        Bar(
            name=name,
            parts=tuple((k, b, bytes_text(b)) for k, b in p.memory_parts.items() if b),
            text=bytes_text(p.memory),
        )
        for name, p in pairs
    ]
    yield bars(rows, "Memory of the fullest device under both plans, by kind")


def difference_tables(plan: Plan, other: Plan) -> tuple[Table, ...]:
    """Figures side by side, then different strategies and storage, with equal layers folded."""
    axes = " and ".join(
        " ".join(axis.name for axis in p.mesh) or "one device" for p in (plan, other)
    )
    return (
        _figures(plan, other),
        _differing("Operators with another strategy", _strategies(plan), _strategies(other)),
        _differing(
            f"Parameters stored otherwise: layouts on {axes}", _stored(plan), _stored(other)
        ),
    )


def difference_json(plan: Plan, other: Plan) -> dict[str, Any]:
    """The differences as one object: seconds, bytes and names.

    Every operator and parameter is there by itself.
    """

    def pairs(mine: dict[str, str], theirs: dict[str, str]) -> dict[str, list[str | None]]:
        return {name: [mine.get(name), theirs.get(name)] for name in _unlike(mine, theirs)}

    chosen, chosen_there = (dict(zip(_WORDS, _words(p), strict=True)) for p in (plan, other))
    return {
        "same_model": plan.model.fingerprint == other.model.fingerprint,
        "predicted": [p.predicted.model_dump(mode="json") for p in (plan, other)],
        "choices": {name: [chosen[name], chosen_there[name]] for name in _WORDS},
        "operators": pairs(_strategies(plan), _strategies(other)),
        "parameters": pairs(_stored(plan), _stored(other)),
    }


def _stored(plan: Plan) -> dict[str, str]:
    """The storage of each parameter and of its optimizer state, in words."""
    return {name: f"{p.storage}, {p.state}" for name, p in plan.parameters.items()}


def _unlike(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """The names with different values in both."""
    return [name for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)]


def _strategies(plan: Plan) -> dict[str, str]:
    """The work of each operator on each axis, in words."""
    axes = [axis.name for axis in plan.mesh]
    known = dict[tuple[str, ...], str]()
    for operator in plan.operators.values():
        if operator.strategy not in known:
            words = [
                f"{axis} {BARE.get(o, f'splits {o}')}"
                for axis, o in zip(axes, operator.strategy, strict=False)
            ]
            known[operator.strategy] = "; ".join(words) or "whole"
    return {name: known[operator.strategy] for name, operator in plan.operators.items()}


def _figures(plan: Plan, other: Plan) -> Table:
    rows = []
    for name in _SECONDS:
        here = getattr(plan.predicted, name)
        there = getattr(other.predicted, name)
        rows.append((name, seconds_text(here), seconds_text(there), _change(here, there)))
    here = plan.predicted.memory
    there = other.predicted.memory
    rows.append(("memory", bytes_text(here), bytes_text(there), _change(here, there)))
    for kind in dict.fromkeys((*plan.predicted.memory_parts, *other.predicted.memory_parts)):
        here, there = (p.predicted.memory_parts.get(kind, 0.0) for p in (plan, other))
        if here or there:
            rows.append(
                (f"memory: {kind}", bytes_text(here), bytes_text(there), _change(here, there))
            )
    rows += [
        (name, a, b, "" if a == b else "differs")
        for name, a, b in zip(_WORDS, _words(plan), _words(other), strict=True)
    ]
    return Table(
        title="Figures",
        columns=("figure", ">this plan", ">other plan", ">change"),
        rows=tuple(rows),
    )


_WORDS = (
    "model",
    "cluster",
    "framework",
    "devices",
    "mesh",
    "stages",
    "micro-batches",
    "schedule",
    "recomputed operators",
    "gathered",
    "method",
)


def _words(plan: Plan) -> tuple[str, ...]:
    mesh = " x ".join(f"{axis.name}={axis.size}" for axis in plan.mesh)
    schedule = plan.schedule
    recomputed = sum(map(len, schedule.recompute))
    return (
        plan.model.name,
        plan.cluster,
        plan.framework,
        str(plan.devices),
        mesh,
        str(stages_of(plan)),
        str(schedule.micro_batches),
        schedule.pipeline,
        str(recomputed),
        f"{GATHERED[schedule.gathered]}, {schedule.accumulated}",
        plan.provenance.method,
    )


def _change(here: float, there: float) -> str:
    return f"{there / here - 1:+.1%}" if here > 0 else ""


def _differing(title: str, mine: dict[str, str], theirs: dict[str, str]) -> Table:
    rows = folded(
        (name.strip("/"), mine.get(name, "absent"), theirs.get(name, "absent"))
        for name in _unlike(mine, theirs)
    )
    shown = tuple((row[0], str(count), *row[1:]) for count, row in rows)
    return Table(
        title=title,
        columns=("name", ">each", "this plan", "other plan"),
        rows=shown or (("none", "", "", ""),),
    )
