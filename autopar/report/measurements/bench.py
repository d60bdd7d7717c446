"""Measured collectives beside predicted ones, as a table, an object and a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from autopar.analysis.measurements.collective_bench import Bench
from autopar.analysis.measurements.collective_methods import MethodRow
from autopar.costmodel import Cluster
from autopar.report.plot import Panel, Series
from autopar.report.tables import Table
from autopar.units import bytes_text, rate_text, seconds_text


def bench_json(bench: Bench) -> dict[str, Any]:
    """The rows as an object."""
    names = (
        "kind",
        "level",
        "ranks",
        "nbytes",
        "seconds",
        "predicted",
        "error",
        "algorithm_bandwidth",
        "bus_bandwidth",
        "spread",
    )
    rows = [{name: getattr(row, name) for name in names} for row in bench.rows]
    return {"cluster": bench.cluster, "backend": bench.backend, "rows": rows}


def bench_parts(bench: Bench) -> list[str | Table]:
    """The rows as a table."""
    rows = tuple(
        (
            row.kind,
            row.level,
            str(row.ranks),
            bytes_text(row.nbytes),
            seconds_text(row.seconds),
            seconds_text(row.predicted),
            f"{row.error:+.0%}",
            rate_text(row.algorithm_bandwidth, "B/s"),
            rate_text(row.bus_bandwidth, "B/s"),
            rate_text(row.predicted_bus_bandwidth, "B/s"),
            f"{row.spread:.0%}",
        )
        for row in bench.rows
    )
    columns = (
        "collective",
        "level",
        ">ranks",
        ">bytes",
        ">time",
        ">predicted",
        ">error",
        ">algorithm bandwidth",
        ">bus bandwidth",
        ">bus bandwidth predicted",
        ">repeats within",
    )
    title = f"Collectives by {bench.backend}, beside the model's prediction for {bench.cluster}"
    return [Table(title=title, columns=columns, rows=rows)]


def methods_json(rows: Sequence[MethodRow], cluster: Cluster) -> dict[str, Any]:
    """The methods as an object."""
    return {
        "cluster": cluster.name,
        "backend": cluster.backend,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def methods_parts(rows: Sequence[MethodRow], cluster: Cluster) -> list[str | Table]:
    """The methods as a table, with the meaning of its terms."""
    told = tuple(
        (
            row.kind,
            row.method,
            row.steps,
            row.traffic,
            bytes_text(row.nbytes),
            bytes_text(row.port),
            seconds_text(row.seconds),
            row.taken,
            seconds_text(row.taken_seconds),
        )
        for row in rows
    )
    columns = (
        "collective",
        "method",
        "steps",
        "traffic",
        ">bytes",
        ">busiest port",
        ">time",
        f"{cluster.backend} takes",
        ">its time",
    )
    title = f"Methods among {cluster.devices} devices of {cluster.name}"
    terms = (
        "Time: launch + steps x latency + traffic x bytes / rate, on the slowest level. p: "
        "devices; l: log2 p, rounded up; q: (p - 1) / p; d: l, or two more than that of the power "
        "of two below p; w: about l / 2; a x b: the devices as a torus. chain, two_tree and "
        "in_switch stream small segments; in_switch needs a switch that adds up."
    )
    return [Table(title=title, columns=columns, rows=told), terms]


def bench_panels(bench: Bench) -> list[Panel]:
    """Bus bandwidth over bytes, one panel a collective: dots are measured, lines predicted."""
    panels = []
    for kind in dict.fromkeys(row.kind for row in bench.rows if row.nbytes):
        series: list[Series] = []
        places = dict.fromkeys((row.level, row.ranks) for row in bench.rows if row.kind == kind)
        for colour, place in enumerate(places):
            rows = [
                row for row in bench.rows if row.kind == kind and (row.level, row.ranks) == place
            ]
            measured = tuple((float(row.nbytes), row.bus_bandwidth / 1e9) for row in rows)
            model = tuple((float(row.nbytes), row.predicted_bus_bandwidth / 1e9) for row in rows)
            series.append(
                Series(name=f"{place[1]} ranks, {place[0]}", points=measured, colour=colour)
            )
            series.append(Series(name="", points=model, colour=colour, joined=True))
        panels.append(Panel(title=kind, x="bytes", y="bus bandwidth, GB/s", series=tuple(series)))
    return panels
