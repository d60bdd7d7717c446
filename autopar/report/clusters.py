"""What `autopar cluster` prints: presets and their figures, with units."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autopar.costmodel import Cluster, Level, collective_time
from autopar.costmodel.collectives import fastest_way

from .tables import Table
from .units import bytes_text, rate_text, seconds_text

SIZES = (2**10, 2**20, 2**26, 2**30)
"""Of the all-reduces that are shown (B)."""


def list_table(clusters: Iterable[Cluster]) -> Table:
    """One row a cluster."""
    rows = tuple((c.name, c.device.name, str(c.devices), _levels(c), bytes_text(c.device.memory_capacity)) for c in clusters)
    return Table(title="Clusters", columns=("name", "device", ">devices", "levels", ">memory"), rows=rows)


def _levels(cluster: Cluster) -> str:
    return " x ".join(f"{level.size} {level.name}" for level in reversed(cluster.levels))


def list_json(clusters: Iterable[Cluster]) -> dict[str, Any]:
    """The same as an object."""
    found = [{"name": c.name, "device": c.device.name, "devices": c.devices, "memory": c.device.memory_capacity} for c in clusters]
    return {"clusters": found}


def show_parts(cluster: Cluster) -> list[str | Table]:
    """Everything about one cluster; a figure is followed by its source."""
    device = cluster.device
    figures = [
        *((f"peak.{family}", rate_text(value, "FLOP/s")) for family, value in device.peak.items()),
        ("matmul_fraction", f"{device.matmul_fraction:.0%} of the peak in large matrix products"),
        ("half_size", f"half of that with a smallest dimension of {device.half_size:g}"),
        ("memory_bandwidth", rate_text(device.memory_bandwidth, "B/s")),
        ("memory_fraction", f"{device.memory_fraction:.0%} of it reached"),
        ("memory_capacity", bytes_text(device.memory_capacity)),
        ("reserved", bytes_text(device.reserved)),
        ("launch", f"{seconds_text(device.launch)} per operator"),
    ]
    rows = tuple((name, text, cluster.sources.get(f"device.{name}", "")) for name, text in figures)
    levels = tuple(
        (
            level.name,
            str(level.size),
            seconds_text(level.latency),
            rate_text(level.bandwidth, "B/s"),
            f"{level.efficiency:.0%}",
            str(level.shared_by),
            ", ".join((*(() if level.duplex else ("half duplex",)), *level.features)),
        )
        for level in cluster.levels
    )
    columns = ("level", ">joins", ">latency", ">bandwidth one way", ">reached", ">devices a port", "features")
    shared = ", ranks of one host that share it" if cluster.shared_host else ""
    return [
        f"cluster {cluster.name}: {cluster.devices} x {device.name}, collectives by {cluster.backend}{shared}",
        Table(title="Device", columns=("figure", "value", "source"), rows=rows),
        Table(title="Links, from the inside out", columns=columns, rows=levels),
        *_protocols(cluster),
        *_all_reduces(cluster),
    ]


def _protocols(cluster: Cluster) -> list[Table]:
    """How the backend sends over each level, where that is known."""
    rows = tuple(
        (level.name, p.name, ", ".join(p.algorithms), seconds_text(p.overhead), seconds_text(p.latency), f"{p.efficiency:.1%}")
        for level in cluster.levels
        for p in level.protocols
    )
    columns = ("level", "protocol", "algorithms", ">overhead", ">a step", ">reached")
    return [Table(title="Protocols", columns=columns, rows=rows)] if rows else []


def _all_reduces(cluster: Cluster) -> list[Table]:
    """What an all-reduce of some sizes runs on each level, and how long it takes."""
    if cluster.measured:
        return []
    rows = tuple(_all_reduce(cluster, level, nbytes) for level in cluster.levels if level.size > 1 for nbytes in SIZES)
    return [Table(title="All-reduce", columns=("level", ">ranks", ">of", "algorithm", ">takes"), rows=rows)] if rows else []


def _all_reduce(cluster: Cluster, level: Level, nbytes: int) -> tuple[str, ...]:
    way = fastest_way("all_reduce", nbytes, level.size, level=level.name, cluster=cluster)
    seconds = float(collective_time("all_reduce", nbytes, level.size, level=level.name, cluster=cluster))
    return level.name, str(level.size), bytes_text(nbytes), way.name, seconds_text(seconds)
