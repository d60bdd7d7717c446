"""Scaling of a cluster's figures, each marked with its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.costmodel.cluster.level import Level
from autopar.costmodel.cluster.measured_collectives import Measured
from autopar.costmodel.cluster.source import Source
from autopar.errors import UsageError
from autopar.units import rate_text, seconds_text

MOST = 20.0
"""The largest factor on a figure; beyond it the machine is another one, or the run too small to
measure it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A scaled figure, named as in the cluster file.

    `predicted`, `measured`: the seconds of `what`, the work that it was scaled by.
    """

    figure: str
    unit: str
    before: float
    after: float
    what: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Predicted and measured seconds of a step, of the work `what` that is measured together.

    `launches`: the predicted seconds of launches, which no rate changes; `length`: the factor on
    them.
    """

    what: str
    predicted: float
    measured: float
    launches: float = 0.0
    length: float = 1.0

    def factor(self, figure: str) -> float:
        """The factor on the rates; `UsageError` if there is none."""
        left = self.measured - self.length * self.launches
        factor = (self.predicted - self.launches) / left if left > 0 else 2 * MOST
        if not 1 / MOST <= factor <= MOST:
            raise UsageError(
                f"{figure} would be scaled by {factor:.3g}: {self.what} took "
                f"{seconds_text(self.measured)} where "
                f"{seconds_text(self.predicted)} were predicted; beyond a factor of {MOST:.0f} the "
                "machine is another than the cluster's, "
                "or the model too small to measure: start from a nearer cluster (--cluster, "
                "autopar calibrate), or run a larger model"
            )
        return factor


def _told(cluster: Cluster, rows: Sequence[Scaled]) -> Cluster:
    """The cluster with the scaled figures marked as such."""
    said = {
        row.figure: Source.of(
            f"measured: a profile of a run, in which {row.what} took {seconds_text(row.measured)} "
            f"where {seconds_text(row.predicted)} were "
            f"predicted; {figure_text(row.before, row.unit)} before"
        )
        for row in rows
    }
    return replace(cluster, sources={**cluster.sources, **said})


def _row(group: Group, figure: str, unit: str, before: float, after: float) -> Scaled:
    return Scaled(
        figure=figure,
        unit=unit,
        before=before,
        after=after,
        what=group.what,
        predicted=group.predicted,
        measured=group.measured,
    )


def with_arithmetic(
    cluster: Cluster, group: Group, families: Mapping[str, str]
) -> tuple[Cluster, list[Scaled]]:
    """The cluster with scaled rates of arithmetic, in each family of types."""
    rows = []
    for family, dtype in families.items():
        figure = f"device.peak.{family}"
        before = cluster.device.flops(dtype)
        rows.append(_row(group, figure, "FLOP/s", before, before * group.factor(figure)))
    peak = {
        **cluster.device.peak,
        **{family: row.after for family, row in zip(families, rows, strict=True)},
    }
    return _told(replace(cluster, device=replace(cluster.device, peak=peak)), rows), rows


def with_memory(cluster: Cluster, group: Group) -> tuple[Cluster, list[Scaled]]:
    """The cluster with a scaled bandwidth of memory."""
    figure = "device.memory_bandwidth"
    before = cluster.device.memory_bandwidth
    scaled = _row(group, figure, "B/s", before, before * group.factor(figure))
    return _told(
        replace(cluster, device=replace(cluster.device, memory_bandwidth=scaled.after)), [scaled]
    ), [scaled]


def with_launch(cluster: Cluster, group: Group, seconds: float) -> tuple[Cluster, list[Scaled]]:
    """The cluster with other seconds of a launch."""
    scaled = _row(group, "device.launch", "s", cluster.device.launch, seconds)
    return _told(replace(cluster, device=replace(cluster.device, launch=seconds)), [scaled]), [
        scaled
    ]


def with_links(cluster: Cluster, group: Group, name: str) -> tuple[Cluster, list[Scaled]]:
    """The cluster with one level scaled, bandwidth and latency alike."""
    factor = group.factor(f"{name}.bandwidth")
    old = cluster.level(name)
    new = _faster(old, factor)
    rows = [_row(group, f"{name}.bandwidth", "B/s", old.bandwidth, new.bandwidth)]
    if old.latency:
        rows.append(_row(group, f"{name}.latency", "s", old.latency, new.latency))
    levels = tuple(new if level is old else level for level in cluster.levels)
    measured = tuple(
        _curve(entry, factor) if entry.level == name else entry for entry in cluster.measured
    )
    return _told(replace(cluster, levels=levels, measured=measured), rows), rows


def _faster(level: Level, factor: float) -> Level:
    """The level with all times divided by `factor`."""
    protocols = tuple(
        replace(
            one,
            latency=one.latency / factor,
            overhead=one.overhead / factor,
            copy_bandwidth=one.copy_bandwidth and one.copy_bandwidth * factor,
        )
        for one in level.protocols
    )
    return replace(
        level,
        latency=level.latency / factor,
        bandwidth=level.bandwidth * factor,
        peer_bandwidth=level.peer_bandwidth and level.peer_bandwidth * factor,
        protocols=protocols,
    )


def _curve(entry: Measured, factor: float) -> Measured:
    curve = entry.shared(factor).curve
    return replace(entry, curve=replace(curve, alpha=curve.alpha / factor))


def figure_text(value: float, unit: str) -> str:
    """A figure with its unit."""
    return seconds_text(value) if unit == "s" else rate_text(value, unit)
