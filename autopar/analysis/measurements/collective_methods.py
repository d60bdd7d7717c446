"""Methods of collectives priced on a cluster, beside the one that its backend takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.costmodel import Cluster, bind_axes, collective_time
from autopar.costmodel.collectives.methods import METHODS, NAMES, method_line, method_of
from autopar.costmodel.collectives.times import fastest_way
from autopar.errors import UsageError, unknown

EVERY = "all"
"""The word for all methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """A method of a collective of `nbytes` among `ranks`.

    `steps`, `traffic`: the terms of the closed form. `port`: bytes through the busiest port.
    `taken`, `taken_seconds`: of what the backend runs.
    """

    kind: str
    method: str
    steps: str
    traffic: str
    ranks: int
    nbytes: int
    port: float
    seconds: float
    taken: str
    taken_seconds: float


def method_rows(
    cluster: Cluster, methods: Sequence[str], kinds: Sequence[str], sizes: Sequence[int]
) -> list[MethodRow]:
    """The rows of methods (`EVERY`: all) of collectives (none: all), among all devices."""
    if cluster.devices < 2:
        raise UsageError("--method prices collectives of two devices or more: give --devices")
    for name in methods:
        if name not in (*NAMES, EVERY):
            raise UsageError(unknown("method", name, (*NAMES, EVERY)))
    for kind in kinds:
        if kind not in METHODS:
            raise UsageError(unknown("collective with methods", kind, METHODS))
    rows = [
        _row(cluster, kind, name, nbytes)
        for kind in kinds or METHODS
        for nbytes in sizes
        for name in METHODS[kind]
        if name in methods or EVERY in methods
    ]
    if not rows:
        raise UsageError(f"{', '.join(methods)} is no method of {', '.join(kinds)}")
    return rows


def _row(cluster: Cluster, kind: str, name: str, nbytes: int) -> MethodRow:
    group = cluster.devices
    levels = bind_axes(cluster, (group,))
    assert levels is not None
    start, each = method_line(kind, name, cluster)
    steps, traffic = METHODS[kind][name]
    taken = fastest_way(kind, nbytes, group, level=levels[0], cluster=cluster)
    return MethodRow(
        kind=kind,
        method=name,
        steps=steps,
        traffic=traffic,
        ranks=group,
        nbytes=nbytes,
        port=method_of(kind, name).traffic(group) * nbytes,
        seconds=start + each * nbytes,
        taken=taken.name,
        taken_seconds=float(collective_time(kind, nbytes, group, level=levels[0], cluster=cluster)),
    )
