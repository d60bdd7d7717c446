"""Measured collectives overrule the algorithms, and give the links of groups not measured.

For other group sizes and levels the closed form of the table is used, with the links' latency and
rate solved from the nearest measured size of the same collective on each level. With A and B the
table's seconds and seconds per byte for the measured group:

    latency' = latency * alpha / A        rate' = rate * B / beta

A port that several groups drive at once is no faster than its own rate, which the message of one
sender (`send`) shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autopar.costmodel.cluster.axis_binding import parse_span
from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.cluster.level import Level
from autopar.costmodel.cluster.measured_collectives import Curve, Line, Measured

Table = Callable[[str, int, str, Cluster], tuple[Line, ...]]
"""The lines of a collective by the table of algorithms: kind, group, level and cluster."""


def measured_curve(
    kind: str, group: int, level: str, cluster: Cluster, table: Table
) -> Curve | None:
    """The curve of a collective from its measurements; None if a level of the group has none."""
    span = parse_span(cluster, level, group)
    known = [entry for entry in cluster.measured if entry.kind == kind]
    if not known or not span:
        return None
    inside = dict(zip((place.name for place in cluster.levels), (1, *cluster.units), strict=False))
    for entry in known:
        if (entry.level, entry.group) == (level, group):
            # A measurement holds where as many devices drive the port as did then.
            alone = len(span) > 1 or span[0][0].shared_by == 1
            if alone or entry.drivers == min(inside[level], span[0][0].shared_by):
                return entry.curve
    nearest = {place.name: _nearest(known, place.name, branches) for place, branches in span}
    if any(entry is None for entry in nearest.values()):
        return None
    return _derived(
        kind,
        group,
        level,
        cluster,
        {name: entry for name, entry in nearest.items() if entry is not None},
        table,
    )


def _nearest(known: list[Measured], level: str, branches: int) -> Measured | None:
    """Return the measurement on one level with the nearest group in ratio.

    Of two equally near ones it is the larger.
    """
    here = [entry for entry in known if entry.level == level]
    return min(
        here, key=lambda entry: (abs(math.log(entry.group / branches)), -entry.group), default=None
    )


def _derived(
    kind: str, group: int, level: str, cluster: Cluster, nearest: dict[str, Measured], table: Table
) -> Curve:
    """The closed form of the table on links solved from measurements, segment by segment."""
    # Measured constants include the launch; and the table must not find the measurements again.
    raw = replace(cluster, measured=(), device=replace(cluster.device, launch=0.0))
    shared = table(kind, group, level, raw)[-1][1]
    segments: list[Line] = []
    for above in (False, True):
        solved = {
            name: _solved(raw.level(name), entry, raw, table, above=above)
            for name, entry in nearest.items()
        }
        levels = tuple(solved.get(place.name, place) for place in raw.levels)
        lines = table(kind, group, level, replace(raw, levels=levels))
        segments.append(lines[-1 if above else 0])
    # The level with the slowest bytes decides where the line breaks.
    limit = max(nearest.values(), key=lambda entry: entry.curve.beta).curve.limit
    (alpha, beta), (_, beta_above) = segments
    floor = (
        shared
        if any(place.shared_by > 1 for place, _ in parse_span(cluster, level, group))
        else 0.0
    )
    return Curve(
        alpha=alpha,
        beta=max(beta, floor),
        limit=limit,
        beta_above=max(beta_above, floor) if limit < math.inf else 0.0,
    )


def _solved(place: Level, entry: Measured, raw: Cluster, table: Table, *, above: bool) -> Level:
    """Return the level with the latency and rate that reproduce a measurement.

    They are those of a device that has its port to itself.
    """
    # A latency of zero could not be scaled to the measured one.
    alone = replace(
        place, size=entry.group, shared_by=1, latency=place.latency or 1e-6, protocols=()
    )
    lines = table(
        entry.kind, entry.group, place.name, replace(raw, levels=(alone,), shared_host=False)
    )
    per_byte = lines[-1 if above else 0][1]
    sharing = min(place.shared_by, entry.drivers)
    beta = (
        entry.curve.beta_above if above and entry.curve.limit < math.inf else entry.curve.beta
    ) / sharing
    slower = beta / per_byte if beta > 0 and per_byte > 0 else 1.0
    latency = alone.latency * (entry.curve.alpha / lines[0][0] if lines[0][0] > 0 else 1.0)
    peer = None if place.peer_bandwidth is None else place.peer_bandwidth / slower
    return replace(
        place,
        latency=latency,
        bandwidth=place.bandwidth / slower,
        peer_bandwidth=peer,
        shared_by=1,
        protocols=(),
    )
