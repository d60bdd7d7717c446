"""The scaling of a model: the best plans by cluster and number of devices.

    speed-up = step(fewest devices) / step        efficiency = speed-up x fewest devices / devices
    money of a step = devices x price of a device and hour x step / 3600

The global batch is constant (strong scaling). "Fewest devices": of a cluster, with a plan that
fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.api import plan_loaded
from autopar.errors import NoPlanFits, UsageError
from autopar.model import LoadedModel
from autopar.options.plan_options import choose_cluster
from autopar.planning.model.progress import Progress
from autopar.schemes import scheme_of
from autopar.sharding.analysis import analyse

from .side_by_side import side_by_side

HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The best plan of a cluster on so many devices.

    `step`: seconds; None if there is no plan, and `why` says so.

    `batch`: samples of a step. `price`: of a device and hour, if known.
    """

    cluster: str
    devices: int
    batch: int
    step: float | None = None
    memory: float = 0.0
    named: str = ""
    why: str = ""
    price: float | None = None
    efficiency: float | None = None

    @property
    def money(self) -> float | None:
        """The price of a step."""
        return (
            None
            if self.price is None or self.step is None
            else self.devices * self.price * self.step / HOUR
        )

    @property
    def per_money(self) -> float | None:
        """Samples for a unit of money."""
        return self.batch / self.money if self.money else None


def scaling(
    model: LoadedModel,
    clusters: Sequence[str],
    counts: Sequence[int],
    prices: Mapping[str, float],
    *,
    progress: Progress | None = None,
    **asked: Any,
) -> list[Row]:
    """A row for every cluster and number of devices."""
    train = asked.get("mode", "train") == "train"
    shapes = [model.graph.tensors[name].shape for name in model.graph.inputs]
    batch = next((shape[0] for shape in shapes if shape), 1)

    def planned(place: tuple[str, int]) -> Row:
        cluster, devices = place
        row = Row(cluster=cluster, devices=devices, batch=batch, price=prices.get(cluster))
        try:
            chosen, _ = choose_cluster(cluster, devices)
            plan = plan_loaded(model, cluster=chosen, **asked).plan
        except NoPlanFits:
            return replace(row, why="does not fit")
        except UsageError as error:
            return replace(row, why=str(error))
        named = (
            scheme_of(plan, analyse(model.graph, train=train)).called
            if devices > 1
            else "one device"
        )
        return replace(row, step=plan.predicted.step, memory=plan.predicted.memory, named=named)

    places = [(cluster, devices) for cluster in clusters for devices in counts]
    rows: list[Row] = []
    if progress:
        progress(0, len(places), "clusters")
    for row in side_by_side(planned, places):
        rows.append(row)
        if progress:
            progress(len(rows), len(places), f"{row.cluster}, {row.devices} devices")
    return [_efficient(row, rows) for row in rows]


def _efficient(row: Row, rows: Sequence[Row]) -> Row:
    fewest = next((r for r in rows if r.cluster == row.cluster and r.step is not None), None)
    if fewest is None or fewest.step is None or not row.step:
        return row
    return replace(row, efficiency=fewest.step * fewest.devices / (row.step * row.devices))
