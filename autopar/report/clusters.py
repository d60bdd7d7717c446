"""The output of `autopar cluster`: presets and their figures, with units."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autopar.costmodel import Cluster, Device, Level, collective_time
from autopar.costmodel.cluster.source import Source
from autopar.costmodel.collectives import fastest_way
from autopar.costmodel.device.host_actions import HOST_ACTIONS
from autopar.costmodel.device.kernel_seconds import large_product_rate
from autopar.costmodel.device.measured_kernels import SHEET
from autopar.units import bytes_text, rate_text, seconds_text

from .kernel_constants import kernel_tables
from .tables import Table

SIZES = (2**10, 2**20, 2**26, 2**30)
"""Bytes of the all-reduces to show."""


def list_table(clusters: Iterable[Cluster]) -> Table:
    """One row a cluster."""
    rows = tuple(
        (c.name, c.device.name, str(c.devices), _levels(c), bytes_text(c.device.memory_capacity))
        for c in clusters
    )
    return Table(
        title="Clusters", columns=("name", "device", ">devices", "levels", ">memory"), rows=rows
    )


def _levels(cluster: Cluster) -> str:
    return " x ".join(f"{level.size} {level.name}" for level in reversed(cluster.levels))


def list_json(clusters: Iterable[Cluster]) -> dict[str, Any]:
    """The rows as an object."""
    rows = [
        {
            "name": c.name,
            "device": c.device.name,
            "devices": c.devices,
            "memory": c.device.memory_capacity,
        }
        for c in clusters
    ]
    return {"clusters": rows}


def show_parts(cluster: Cluster) -> list[str | Table]:
    """Everything about one cluster, pool by pool; each figure with its source."""
    if not cluster.joined:
        return _shown(cluster)
    columns = (">devices", "cluster", "device", "levels", ">memory")
    rows = tuple(
        (
            f"{first} to {first + pool.devices - 1}",
            pool.name,
            pool.device.name,
            _levels(pool),
            bytes_text(pool.device.memory_capacity),
        )
        for first, pool in zip(cluster.starts, cluster.pools, strict=True)
    )
    return [
        f"cluster {cluster.name}: {cluster.devices} devices in {len(cluster.pools)} pools, "
        f"collectives by {cluster.backend}",
        Table(title="Pools", columns=columns, rows=rows),
        _links("Link between the pools", cluster.levels[-1:]),
        *(part for pool in cluster.pools for part in ("", *_shown(pool))),
    ]


def _shown(cluster: Cluster) -> list[str | Table]:
    rows = tuple(
        (name, text, str(cluster.sources.get(f"device.{name}", "")))
        for name, text in _figures(cluster.device)
    )
    shared = ", ranks of one host that share it" if cluster.shared_host else ""
    return [
        f"cluster {cluster.name}: {cluster.inventory}, collectives by {cluster.backend}{shared}",
        Table(title="Device", columns=("figure", "value", "source"), rows=rows),
        *kernel_tables(cluster.device),
        _links("Links, from the inside out", cluster.levels),
        *_protocols(cluster),
        *_all_reduces(cluster),
    ]


def _figures(device: Device) -> list[tuple[str, str]]:
    """Every figure of a device by its name in a cluster file."""
    host = {
        "host_bandwidth": (device.host_bandwidth, "B/s"),
        "host_memory": (device.host_memory, "B"),
    }
    return [
        *((f"peak.{family}", rate_text(value, "FLOP/s")) for family, value in device.peak.items()),
        *_products(device),
        *([("units", f"{device.units:g} processors")] if device.units else []),
        (
            "ragged_fraction",
            f"{device.ragged_fraction:.0%} of the rate where rows of operands are no multiple of "
            "16 bytes",
        ),
        *(
            (f"attention.{name}", f"{value:.0%} of the peak")
            for name, value in device.attention.items()
        ),
        ("memory_bandwidth", rate_text(device.memory_bandwidth, "B/s")),
        ("memory_fraction", f"{device.memory_fraction:.0%} of it reached"),
        *(
            [("update_fraction", f"{device.update_fraction:.0%} of it in an optimizer's step")]
            if device.update_fraction
            else []
        ),
        ("memory_capacity", bytes_text(device.memory_capacity)),
        ("reserved", bytes_text(device.reserved)),
        ("launch", f"{seconds_text(device.launch)} per operator"),
        *(
            (f"host.{action}", f"{seconds_text(seconds)} of the host for {HOST_ACTIONS[action]}")
            for action, seconds in device.host.items()
        ),
        ("dispatch", f"{seconds_text(device.dispatch)} of the host per operator"),
        *(
            (name, rate_text(value, unit) if unit == "B/s" else bytes_text(value))
            for name, (value, unit) in host.items()
            if value
        ),
    ]


def _products(device: Device) -> list[tuple[str, str]]:
    """The rates of matrix products, measured or as a fraction of the peak."""
    if device.kernels is None:
        return [
            (
                "matmul_fraction",
                f"{device.matmul_fraction:.0%} of the peak in large matrix products",
            ),
            ("half_size", f"half of that with a smallest dimension of {device.half_size:g}"),
        ]
    dtype = next(iter(device.kernels.products))
    reached = (
        f"{rate_text(large_product_rate(device, dtype), 'FLOP/s')} in large products of {dtype} at "
        "the power limit"
    )
    by_sheet = device.kernels.name == SHEET
    whose = "those of all measured devices" if by_sheet else f"as measured on {device.kernels.name}"
    told = [("kernels", f"{whose}: {reached}")]
    if device.clock != 1:
        told.append(("clock", f"{device.clock:.0%} of the rate of these kernels"))
    return told


def _links(title: str, levels: Iterable[Level]) -> Table:
    rows = tuple(
        (
            level.name,
            str(level.size),
            seconds_text(level.latency),
            rate_text(level.bandwidth, "B/s"),
            f"{level.efficiency:.0%}",
            str(level.shared_by),
            ", ".join((*(() if level.duplex else ("half duplex",)), *level.features)),
        )
        for level in levels
    )
    columns = (
        "level",
        ">joins",
        ">latency",
        ">bandwidth one way",
        ">reached",
        ">devices a port",
        "features",
    )
    return Table(title=title, columns=columns, rows=rows)


def _protocols(cluster: Cluster) -> list[Table]:
    """The backend's protocols on each level, if known."""
    rows = tuple(
        (
            level.name,
            p.name,
            ", ".join(p.collectives) or "all others",
            ", ".join(p.algorithms),
            seconds_text(p.overhead),
            seconds_text(p.latency),
            f"{p.efficiency:.1%}",
            _known(cluster.sources.get(f"{level.name}.{p.key}.efficiency")),
        )
        for level in cluster.levels
        for p in level.protocols
    )
    columns = (
        "level",
        "protocol",
        "for",
        "algorithms",
        ">overhead",
        ">a step",
        ">reached",
        "known how",
    )
    return [Table(title="Protocols", columns=columns, rows=rows)] if rows else []


def _known(source: Source | None) -> str:
    """The kind of a figure, and its error if known."""
    if source is None:
        return ""
    return (
        source.kind
        if source.error is None
        else f"{source.kind}, {source.error:.1%} off on {source.rows} rows"
    )


def _all_reduces(cluster: Cluster) -> list[Table]:
    """The method and the seconds of an all-reduce on each level, for several sizes."""
    if cluster.measured:
        return []
    rows = tuple(
        _all_reduce(cluster, level, nbytes)
        for level in cluster.levels
        if level.size > 1
        for nbytes in SIZES
    )
    if not rows:
        return []
    columns = ("level", ">ranks", ">of", "algorithm", ">takes")
    return [Table(title="All-reduce", columns=columns, rows=rows)]


def _all_reduce(cluster: Cluster, level: Level, nbytes: int) -> tuple[str, ...]:
    way = fastest_way("all_reduce", nbytes, level.size, level=level.name, cluster=cluster)
    seconds = float(
        collective_time("all_reduce", nbytes, level.size, level=level.name, cluster=cluster)
    )
    return level.name, str(level.size), bytes_text(nbytes), way.name, seconds_text(seconds)
