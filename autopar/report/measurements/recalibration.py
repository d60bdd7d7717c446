"""A recalibrated cluster in tables and as an object."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.analysis.measurements.recalibration import Recalibrated
from autopar.analysis.measurements.rescaling import Scaled, figure_text
from autopar.report.printing import Table
from autopar.units import seconds_text


def recalibrated_json(recalibrated: Recalibrated) -> dict[str, Any]:
    """The scaled figures and the steps as plain data."""
    return {
        "scaled": [dataclasses.asdict(figure) for figure in recalibrated.scaled],
        "step": {
            "measured": recalibrated.measured,
            "before": recalibrated.before,
            "after": recalibrated.after,
        },
    }


def recalibrated_parts(recalibrated: Recalibrated) -> list[str | Table]:
    """The scaled figures and the steps in tables."""
    steps = (recalibrated.measured, recalibrated.before, recalibrated.after)
    return [
        Table(
            title="Scaled by the profile",
            columns=("figure", ">before", ">after", ">factor", "measured by"),
            rows=tuple(map(_figure_row, recalibrated.scaled)),
        ),
        Table(
            title="A step",
            columns=(">measured", ">predicted before", ">with the new file"),
            rows=(tuple(map(seconds_text, steps)),),
        ),
    ]


def _figure_row(scaled: Scaled) -> tuple[str, ...]:
    return (
        scaled.figure,
        figure_text(scaled.before, scaled.unit),
        figure_text(scaled.after, scaled.unit),
        f"{scaled.after / scaled.before:.3g}",
        scaled.what,
    )
