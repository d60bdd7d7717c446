"""What differs between two plans, as tables."""

from __future__ import annotations

from ...plan import Plan
from ..folding import folded
from ..tables import Table
from ..units import bytes_text, seconds_text

_SECONDS = ("step", "forward", "backward", "update", "communication", "overlapped", "bubble")


def difference_tables(plan: Plan, other: Plan) -> tuple[Table, ...]:
    """Figures side by side, then strategies and storage where they are not the same; equal layers stand once."""
    strategies = {name: " ".join(o.strategy) for name, o in plan.operators.items()}
    others = {name: " ".join(o.strategy) for name, o in other.operators.items()}
    storage = {name: f"{p.storage}, {p.state}" for name, p in plan.parameters.items()}
    stored = {name: f"{p.storage}, {p.state}" for name, p in other.parameters.items()}
    return (
        _figures(plan, other),
        _differing("Operators with another strategy", strategies, others),
        _differing("Parameters stored otherwise", storage, stored),
    )


def _figures(plan: Plan, other: Plan) -> Table:
    rows = []
    for name in _SECONDS:
        here, there = getattr(plan.predicted, name), getattr(other.predicted, name)
        rows.append((name, seconds_text(here), seconds_text(there), _change(here, there)))
    here, there = plan.predicted.memory, other.predicted.memory
    rows.append(("memory", bytes_text(here), bytes_text(there), _change(here, there)))
    for kind in dict.fromkeys((*plan.predicted.memory_parts, *other.predicted.memory_parts)):
        here, there = (p.predicted.memory_parts.get(kind, 0.0) for p in (plan, other))
        rows.append((f"memory: {kind}", bytes_text(here), bytes_text(there), _change(here, there)))
    rows += [(name, a, b, "" if a == b else "differs") for name, a, b in zip(_WORDS, _words(plan), _words(other), strict=True)]
    return Table(title="Figures", columns=("", ">this plan", ">other plan", ">change"), rows=tuple(rows))


_WORDS = ("model", "cluster", "devices", "mesh", "stages", "micro-batches", "schedule", "recomputed operators", "gathered", "method")


def _words(plan: Plan) -> tuple[str, ...]:
    mesh = " x ".join(f"{axis.name}={axis.size}" for axis in plan.mesh)
    schedule = plan.schedule
    stages = len(plan.stages) // schedule.interleave if plan.stages else 1
    recomputed = sum(map(len, schedule.recompute))
    return (
        plan.model.name, plan.cluster, str(plan.devices), mesh, str(stages), str(schedule.micro_batches), schedule.pipeline,
        str(recomputed), f"{schedule.gathered}, {schedule.accumulated}", plan.provenance.method,
    )  # fmt: skip


def _change(here: float, there: float) -> str:
    return f"{there / here - 1:+.1%}" if here > 0 else ""


def _differing(title: str, mine: dict[str, str], theirs: dict[str, str]) -> Table:
    names = [name for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)]
    rows = folded((name.strip("/"), mine.get(name, "absent"), theirs.get(name, "absent")) for name in names)
    shown = tuple((row[0], str(count), *row[1:]) for count, row in rows)
    return Table(title=title, columns=("name", ">each", "this plan", "other plan"), rows=shown or (("none", "", "", ""),))
