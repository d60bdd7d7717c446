"""`autopar bench collectives`: measured and predicted times and bandwidths, as a table, an object and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.costmodel import Cluster, bind_axes, collective_time, load_cluster
from autopar.costmodel.calibration import agreed, settled, spread
from autopar.costmodel.collectives.bandwidth import bus_factor
from autopar.errors import UsageError, unknown

from .plot import Panel, Series
from .tables import Table
from .units import bytes_text, rate_text, seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One collective at one size: measured and predicted seconds; `spread`: the relative spread of the repeats."""

    kind: str
    level: str
    ranks: int
    nbytes: int
    seconds: float
    predicted: float
    spread: float

    @property
    def error(self) -> float:
        """The error of the prediction, relative to the measurement."""
        return self.predicted / self.seconds - 1

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second on the links."""
        return self.algorithm_bandwidth * bus_factor(self.kind, self.ranks)

    @property
    def predicted_bus_bandwidth(self) -> float:
        """The predicted bytes per second on the links."""
        return self.nbytes / self.predicted * bus_factor(self.kind, self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The measured rows, and the cluster of the predictions."""

    cluster: str
    backend: str
    rows: tuple[Row, ...]


def bench_collectives(
    *, nproc: int | None, backend: str | None, sizes: Sequence[int], kinds: Sequence[str], cluster: str | None
) -> Bench | None:
    """Measure and predict; None on ranks that do not report."""
    from autopar.runtime.measuring import KINDS, Wanted, measure

    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(unknown("collective", kind, KINDS))
    wanted = Wanted(kinds=tuple(kinds) or KINDS, sizes=tuple(sizes), settled=settled, device=False)
    chosen = load_cluster(cluster) if cluster else None
    found, speaks = measure(wanted, nproc=nproc, backend=backend)
    return compared(found, chosen) if speaks else None


def compared(found: Any, cluster: Cluster | None) -> Bench:
    """Rows of `runtime.measuring.Measurements`, with predictions for the cluster, sized to the ranks."""
    chosen = cluster or load_cluster("local-cpu" if found.backend == "gloo" else "dgx-h100")
    sized = chosen.sized(found.nodes * found.per_node)
    levels = {(place.level, place.size): _level(sized, place, found.nodes, found.per_node) for place in found.places}
    rows = tuple(
        Row(
            kind=kind, level=level, ranks=group, nbytes=nbytes, seconds=agreed(repeats), spread=spread(repeats),
            predicted=float(collective_time(kind, nbytes, group, level=levels[level, group], cluster=sized)),
        )
        for (kind, level, group, nbytes), repeats in found.collectives.items()
    )  # fmt: skip
    return Bench(cluster=chosen.name, backend=found.backend, rows=rows)


def _level(cluster: Cluster, place: Any, nodes: int, per_node: int) -> str:
    """The text of the cluster's levels that the groups of a place span."""
    world = nodes * per_node
    sizes: tuple[int, ...]
    if place.size == world:
        sizes, axis = (world,), 0
    elif place.groups[0][1] - place.groups[0][0] == 1 and per_node > 1:
        sizes, axis = (world // place.size, place.size), 1
    else:
        sizes, axis = (nodes // place.size, place.size, per_node), 1
    bound = bind_axes(cluster, sizes)
    assert bound is not None
    return bound[axis]


def bench_json(bench: Bench) -> dict[str, Any]:
    """The rows as an object."""
    names = ("kind", "level", "ranks", "nbytes", "seconds", "predicted", "error", "algorithm_bandwidth", "bus_bandwidth", "spread")
    rows = [{name: getattr(row, name) for name in names} for row in bench.rows]
    return {"cluster": bench.cluster, "backend": bench.backend, "rows": rows}


def bench_parts(bench: Bench) -> list[str | Table]:
    """The rows as a table."""
    rows = tuple(
        (
            row.kind, row.level, str(row.ranks), bytes_text(row.nbytes), seconds_text(row.seconds), seconds_text(row.predicted),
            f"{row.error:+.0%}", rate_text(row.algorithm_bandwidth, "B/s"), rate_text(row.bus_bandwidth, "B/s"),
            rate_text(row.predicted_bus_bandwidth, "B/s"), f"{row.spread:.0%}",
        )
        for row in bench.rows
    )  # fmt: skip
    columns = (
        "collective", "level", ">ranks", ">bytes", ">time", ">predicted", ">error", ">algorithm bandwidth", ">bus bandwidth",
        ">bus bandwidth predicted", ">repeats within",
    )  # fmt: skip
    title = f"Collectives by {bench.backend}, beside the model's prediction for {bench.cluster}"
    return [Table(title=title, columns=columns, rows=rows)]


def bench_panels(bench: Bench) -> list[Panel]:
    """Bus bandwidth over bytes, one panel a collective: dots are measured, lines predicted."""
    panels = []
    for kind in dict.fromkeys(row.kind for row in bench.rows if row.nbytes):
        series: list[Series] = []
        places = dict.fromkeys((row.level, row.ranks) for row in bench.rows if row.kind == kind)
        for colour, place in enumerate(places):
            rows = [row for row in bench.rows if row.kind == kind and (row.level, row.ranks) == place]
            measured = tuple((float(row.nbytes), row.bus_bandwidth / 1e9) for row in rows)
            model = tuple((float(row.nbytes), row.predicted_bus_bandwidth / 1e9) for row in rows)
            series.append(Series(name=f"{place[1]} ranks, {place[0]}", points=measured, colour=colour))
            series.append(Series(name="", points=model, colour=colour, joined=True))
        panels.append(Panel(title=kind, x="bytes", y="bus bandwidth, GB/s", series=tuple(series)))
    return panels
