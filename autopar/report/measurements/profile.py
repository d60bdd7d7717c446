"""The profile of a run beside the predictions, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopar.report.tables import Table
from autopar.units import bytes_text, seconds_text

if TYPE_CHECKING:
    pass


def profile_parts(profile: Mapping[str, Any]) -> list[str | Table]:
    """The measurements of `autopar.profile` next to the predictions."""
    rows = tuple(
        (
            part["part"],
            _text(part["measured"], part["unit"]),
            _text(part["predicted"], part["unit"]),
        )
        for part in profile["parts"]
    )
    kinds = tuple((kind, seconds_text(seconds)) for kind, seconds in profile["kinds"].items())
    largest = sorted(profile["actions"].items(), key=lambda action: -action[1])[:10]
    actions = tuple((name, seconds_text(seconds)) for name, seconds in largest)
    return [
        Table(title="A step of rank 0", columns=("part", ">measured", ">predicted"), rows=rows),
        *_of_stages(profile.get("stages", ())),
        Table(title="By kind of operator", columns=("operators", ">time"), rows=kinds),
        Table(title="The longest actions of the order", columns=("action", ">time"), rows=actions),
        "\n".join(profile["deviations"]),
    ]


STAGE_COLUMNS: Mapping[str, str] = {
    "forward": "forward",
    "backward": "backward",
    "between stages, waiting included": "bubble",
    "collectives": "collectives",
    "update": "update",
    "idle and others": "idle",
    "memory beside parameters and optimizer": "memory",
}
"""Parts of a profile, and their columns."""


def _of_stages(profiles: Sequence[Mapping[str, Any]]) -> list[str | Table]:
    """A table of the stages, each with measured and predicted seconds; nothing without stages."""
    rows = []
    for one in profiles:
        parts = {part["part"]: part for part in one["parts"]}
        for kind in ("measured", "predicted"):
            cells = (_text(parts[name][kind], parts[name]["unit"]) for name in STAGE_COLUMNS)
            rows.append((f"{one['stage']} {kind}", *cells))
    columns = ("stage", *(f">{name}" for name in STAGE_COLUMNS.values()))
    return (
        [Table(title="The stages, of each its first rank", columns=columns, rows=tuple(rows))]
        if rows
        else []
    )


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return bytes_text(value) if unit == "B" else seconds_text(value)
