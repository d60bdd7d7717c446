"""The measured collectives of a calibrated cluster as a table."""

from __future__ import annotations

import math

from autopar.costmodel import Cluster
from autopar.report.tables import Table
from autopar.units import bytes_text, rate_text, seconds_text


def calibrated_parts(cluster: Cluster) -> list[str | Table]:
    """The measured collectives with their fits."""
    rows = []
    for entry in cluster.measured:
        curve = entry.curve
        two = curve.limit < math.inf
        rows.append(
            (
                entry.kind,
                entry.level,
                str(entry.group),
                seconds_text(curve.alpha),
                _rate(curve.beta),
                bytes_text(curve.limit) if two else "-",
                _rate(curve.beta_above) if two else "-",
                f"{entry.residual:.1%}",
                f"{entry.spread:.1%}",
            )
        )
    columns = (
        "collective",
        "level",
        ">ranks",
        ">latency",
        ">rate",
        ">up to",
        ">rate above",
        ">residual",
        ">repeats within",
    )
    return [Table(title="Collectives as measured", columns=columns, rows=tuple(rows))]


def _rate(beta: float) -> str:
    return rate_text(1 / beta, "B/s") if beta else "-"
