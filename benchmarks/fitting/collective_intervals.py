"""Intervals of the prices of single collectives."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.costmodel import Cluster
from autopar.costmodel.calibration.intervals import Interval, interval_of, wide
from autopar.costmodel.cluster.axis_binding import parse_span
from autopar.costmodel.cluster.residual import Residual, left_by
from autopar.costmodel.cluster.source import Source

ALIKE: Mapping[str, str] = {
    "barrier": "all_reduce",
    "broadcast": "all_gather",
    "reduce": "reduce_scatter",
    "gather": "all_to_all",
    "scatter": "all_to_all",
    "send": "all_to_all",
}
"""Collectives that were not measured, by the one that they run as."""


def collective_interval(
    kind: str, nbytes: float, group: int, *, level: str, cluster: Cluster
) -> Interval:
    """Return the interval of a price of `collective_time`.

    It comes from the residuals of the outermost level, or of the measured curve.
    """
    span = parse_span(cluster, level, group)
    for entry in cluster.measured:
        if (entry.kind, entry.level, entry.group) == (kind, level, group):
            # Of normally distributed errors around 0, nine in ten are below twice their mean size.
            apart = 2 * entry.residual + entry.spread
            return interval_of(
                Residual(low=-apart, middle=0.0, high=apart, rows=1),
                Source(text="its own curve", kind="measured"),
            )
    if not span:
        return interval_of(
            Residual(low=0.0, middle=0.0, high=0.0, rows=0), Source(text="nothing is sent")
        )
    name = left_by(ALIKE.get(kind, kind), nbytes)
    left = span[-1][0].residuals.get(name)
    if left is None:
        return wide("collectives")
    return interval_of(left, Source(text=f"{name} on {span[-1][0].name}", kind="fitted"))
