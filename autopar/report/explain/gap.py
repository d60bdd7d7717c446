"""The gap of a plan as sentences, a table and one object: what its bound leaves out."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.analysis.searches.gap_parts import (
    CANDIDATE,
    CHOICES,
    EXCHANGES,
    HIDDEN,
    MEMORY,
    PASSES,
    PROGRAM,
    GapParts,
)
from autopar.report.tables import Table
from autopar.units import seconds_text

MEANINGS = {
    CANDIDATE: "the bound of another candidate is lower than that of the plan's own, which has the "
    "plan's recompute, ZeRO and schedule here; --gap has such candidates looked at more closely, "
    "--stages, --mesh and --micro-batches leave them out",
    MEMORY: "the limit makes the plan's own candidate slower, and other candidates are not known "
    "to be",
    PASSES: "stages might be so unequal that they wait less",
    HIDDEN: "messages and updates of parameters, done once a step or with every pass, might run "
    "under computation that the plan does not have in their place",
    CHOICES: "the plan's strategies and storage are dearer than the tables' best: memory at one "
    "moment, or the tries of the search, decided",
    EXCHANGES: "exchanges of experts might all run under other computation, in merged passes or "
    "beside a layer",
    PROGRAM: "the program takes longer than its tables add up to: unequal stages, messages between "
    "stages, units of parameters, launches",
}
"""The parts in the order in which they are closed, with what each means."""


def gap_parts_told(parts: GapParts) -> list[str | Table]:
    """Sentences and a table, in the order of printing."""
    rest = parts.step - parts.bound
    holder = f"; the least bound is that of {parts.held_by}" if parts.held_by else ""
    rows = [
        (part, seconds_text(seconds), _share(seconds, parts), MEANINGS[part])
        for part, seconds in parts.seconds.items()
    ]
    rows.append(("together", seconds_text(rest), _share(rest, parts), ""))
    return [
        f"A step takes {seconds_text(parts.step)}, and no plan takes less than "
        f"{seconds_text(parts.bound)}{holder}.",
        Table(
            title="What the bound leaves out, one after the other, at the plan's own candidate",
            columns=("part", ">seconds", ">share", "meaning"),
            rows=tuple(rows),
        ),
    ]


def gap_json(parts: GapParts) -> dict[str, Any]:
    """The answer as one object, in seconds."""
    return dataclasses.asdict(parts)


def _share(seconds: float, parts: GapParts) -> str:
    """Seconds as a share of the bound, as gaps are."""
    return f"{seconds / parts.bound:.1%}" if parts.bound > 0 else ""
