"""Measured collectives beside the predictions for a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.costmodel import Cluster, bind_axes, collective_time, load_cluster
from autopar.costmodel.calibration.collective_curves import agreed, settled, spread
from autopar.costmodel.collectives.bus_bandwidth import bus_factor
from autopar.errors import UsageError, unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One collective at one size, with its measured and predicted seconds.

    `spread`: the relative spread of the repeats.
    """

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
    *,
    nproc: int | None,
    backend: str | None,
    sizes: Sequence[int],
    kinds: Sequence[str],
    cluster: str | None,
) -> Bench | None:
    """Measure and predict; None on ranks that do not report."""
    from autopar.runtime.measuring import KINDS, Wanted, measure

    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(unknown("collective", kind, KINDS))
    wanted = Wanted(kinds=tuple(kinds) or KINDS, sizes=tuple(sizes), settled=settled, device=False)
    chosen = load_cluster(cluster) if cluster else None
    measurements, speaks = measure(wanted, nproc=nproc, backend=backend)
    return compared(measurements, chosen) if speaks else None


def compared(measurements: Any, cluster: Cluster | None) -> Bench:
    """The measurements as rows, each with its prediction for the cluster.

    `measurements`: `runtime.measuring.Measurements`. The cluster is sized to the ranks.
    """
    chosen = cluster or load_cluster("local-cpu" if measurements.backend == "gloo" else "dgx-h100")
    sized = chosen.sized(measurements.nodes * measurements.per_node)
    levels = {
        (place.level, place.size): _level(sized, place, measurements.nodes, measurements.per_node)
        for place in measurements.places
    }
    rows = tuple(
        Row(
            kind=kind,
            level=level,
            ranks=group,
            nbytes=nbytes,
            seconds=agreed(repeats),
            spread=spread(repeats),
            predicted=float(
                collective_time(kind, nbytes, group, level=levels[level, group], cluster=sized)
            ),
        )
        for (kind, level, group, nbytes), repeats in measurements.collectives.items()
    )
    return Bench(cluster=chosen.name, backend=measurements.backend, rows=rows)


def _level(cluster: Cluster, place: Any, nodes: int, per_node: int) -> str:
    """The text of the cluster's levels that the groups of a place span."""
    world = nodes * per_node
    sizes: tuple[int, ...]
    if place.size == world:
        sizes = (world,)
        axis = 0
    # Groups of neighbouring ranks lie within a node; others have one rank of each node.
    elif place.groups[0][1] - place.groups[0][0] == 1 and per_node > 1:
        sizes = (world // place.size, place.size)
        axis = 1
    else:
        sizes = (nodes // place.size, place.size, per_node)
        axis = 1
    bound = bind_axes(cluster, sizes)
    assert bound is not None
    return bound[axis]
