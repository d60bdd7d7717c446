"""The scaling of a model: the best plans by cluster and number of devices, their prices, the cheapest for a target.

    speed-up = step(fewest devices) / step        efficiency = speed-up x fewest devices / devices
    money of a step = devices x price of a device and hour x step / 3600

The global batch is constant (strong scaling). "Fewest devices": of a cluster, with a plan that fits.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..api import plan_loaded
from ..errors import NoPlanFits, UsageError, unknown
from ..model import LoadedModel
from ..plan_options import choose_cluster
from ..planning.ranking import Progress
from ..schemes import scheme_of
from ..sharding.analysis import analyse
from .plot import Panel, Series, svg
from .tables import Table
from .units import amount_text, bytes_text, seconds_text

MOST_COUNTS = 16
"""The most numbers of devices of one cluster."""
HOUR = 3600.0
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The best plan of a cluster on so many devices: its step (None: `why` there is none) and memory.

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
        return None if self.price is None or self.step is None else self.devices * self.price * self.step / HOUR

    @property
    def per_money(self) -> float | None:
        """Samples for a unit of money."""
        return self.batch / self.money if self.money else None


def counts_of(text: str) -> tuple[int, ...]:
    """Numbers of devices: "8", "8,16,24", or "1..64", the ends and the powers of two between.

    >>> counts_of("8"), counts_of("2,6"), counts_of("3..20")
    ((8,), (2, 6), (3, 4, 8, 16, 20))
    """
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match:
            low, high = int(match[1]), int(match[2])
            found += [low, *(2**n for n in range(31) if low < 2**n < high), high] if low <= high else []
        elif part.strip().isdecimal() and len(part.strip()) < 10:
            found.append(int(part))
        else:
            found = []
            break
    if not found or min(found) < 1:
        raise UsageError(f"--devices {text!r} is no number of devices: give 8, or several as 8,16,32 or 1..64")
    unique = tuple(sorted(set(found)))
    if len(unique) > MOST_COUNTS:
        raise UsageError(f"--devices {text} are {len(unique)} numbers of devices; at most {MOST_COUNTS} are planned for at once")
    return unique


def prices_of(pairs: Mapping[str, str], clusters: Sequence[str]) -> dict[str, float]:
    """The prices of a device and hour by cluster."""
    found = {}
    for name, text in pairs.items():
        if name not in clusters:
            raise UsageError(unknown("cluster of --price", name, clusters))
        try:
            found[name] = float(text)
        except ValueError:
            raise UsageError(f"--price {name}={text}: {text!r} is no number") from None
        if not 0 < found[name] < float("inf"):
            raise UsageError(f"--price {name}={text} must be above 0")
    return found


def target_seconds(text: str) -> float:
    """The seconds of a step to reach.

    >>> target_seconds("500ms"), target_seconds("1.5")
    (0.5, 1.5)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(s|ms|us|)\s*", text)
    if match is None or not float(match[1]) > 0:
        raise UsageError(f"--target-step {text!r} is no time: give 1.5, 1.5s or 500ms")
    return float(match[1]) * _SECONDS[match[2]]


def scaling(
    model: LoadedModel, clusters: Sequence[str], counts: Sequence[int], prices: Mapping[str, float], *, progress: Progress | None = None,
    **asked: Any,
) -> list[Row]:  # fmt: skip
    """A row for every cluster and number of devices."""
    train = asked.get("mode", "train") == "train"
    shapes = [model.graph.tensors[name].shape for name in model.graph.inputs]
    batch = next((shape[0] for shape in shapes if shape), 1)
    rows: list[Row] = []
    for number, (cluster, devices) in enumerate((c, n) for c in clusters for n in counts):
        if progress:
            progress(number, len(clusters) * len(counts), f"{cluster}, {devices} devices")
        row = Row(cluster=cluster, devices=devices, batch=batch, price=prices.get(cluster))
        try:
            chosen, _ = choose_cluster(cluster, devices)
            plan = plan_loaded(model, cluster=chosen, **asked).plan
        except (NoPlanFits, UsageError) as error:
            rows.append(replace(row, why="does not fit" if isinstance(error, NoPlanFits) else str(error)))
            continue
        named = scheme_of(plan, analyse(model.graph, train=train)).called if devices > 1 else "one device"
        rows.append(replace(row, step=plan.predicted.step, memory=plan.predicted.memory, named=named))
    return [_efficient(row, rows) for row in rows]


def _efficient(row: Row, rows: Sequence[Row]) -> Row:
    fewest = next((r for r in rows if r.cluster == row.cluster and r.step is not None), None)
    if fewest is None or fewest.step is None or not row.step:
        return row
    return replace(row, efficiency=fewest.step * fewest.devices / (row.step * row.devices))


def scaling_table(rows: Sequence[Row]) -> Table:
    """The rows, with money where prices are known."""
    priced = any(row.price is not None for row in rows)
    more = (">cost", ">per money") if priced else (">memory",)
    columns = ("cluster", ">devices", ">step", ">per second", ">eff.", *more, "plan")
    cells = tuple(_cells(row, priced=priced) for row in rows)
    money = "; cost of a step; samples per unit of money" if priced else ""
    title = f"The best plan by cluster and devices, of one global batch: samples per second; efficiency{money}"
    return Table(title=title, columns=columns, rows=cells)


def _cells(row: Row, *, priced: bool) -> tuple[str, ...]:
    head = (row.cluster, str(row.devices))
    if row.step is None:
        return (*head, *[""] * (5 if priced else 4), row.why)
    efficiency = f"{row.efficiency:.0%}" if row.efficiency is not None else ""
    figures = (seconds_text(row.step), amount_text(row.batch / row.step), efficiency)
    money = (f"{row.money:.3g}" if row.money else "", f"{row.per_money:.3g}" if row.per_money else "")
    return (*head, *figures, *(money if priced else (bytes_text(row.memory),)), row.named)


def answers(rows: Sequence[Row], step: float | None, per_money: float | None) -> list[str]:
    """The fastest, and the cheapest for the targets, in sentences."""
    found = [row for row in rows if row.step is not None]
    if not found:
        return ["no plan fits on any of them"]
    fastest = min(found, key=lambda row: row.step or 0.0)
    said = [f"fastest: {_place(fastest)}"]
    priced = [row for row in found if row.money is not None]
    if priced:
        said.append(f"most samples for the money: {_place(max(priced, key=lambda row: row.per_money or 0.0))}")
    if step is not None:
        within = [row for row in found if row.step is not None and row.step <= step]
        unpriced = min(within, key=lambda row: (row.devices, row.step), default=None)
        cheapest = min((row for row in within if row.price is not None), key=lambda row: row.devices * (row.price or 0.0), default=unpriced)
        what = "by the hour" if cheapest is not None and cheapest.price is not None else "in devices"
        said.append(f"cheapest {what} within {seconds_text(step)} a step: {_place(cheapest) if cheapest else 'none of them'}")
    if per_money is not None:
        enough = [row for row in priced if (row.per_money or 0.0) >= per_money]
        best = min(enough, key=lambda row: row.step or 0.0, default=None)
        said.append(f"fastest with {per_money:g} samples for a unit of money: {_place(best) if best else 'none of them'}")
    return said


def _place(row: Row) -> str:
    assert row.step is not None
    money = f", {row.money:.3g} a step" if row.money else ""
    return f"{row.devices} device{'s' if row.devices > 1 else ''} of {row.cluster}, {seconds_text(row.step)} a step{money}"


def scaling_plot(rows: Sequence[Row]) -> str:
    """Samples a second over devices: a line for each cluster, and one of perfect scaling."""
    series: list[Series] = []
    for colour, cluster in enumerate(dict.fromkeys(row.cluster for row in rows)):
        points = tuple((float(row.devices), row.batch / row.step) for row in rows if row.cluster == cluster and row.step)
        if points:
            ideal = tuple((devices, points[0][1] * devices / points[0][0]) for devices, _ in points)
            series.append(Series(name=cluster, points=points, colour=colour, joined=True))
            series.append(Series(name="", points=ideal, colour=7, joined=True))
    return svg([Panel(title="samples a second over devices; grey: perfect scaling", x="devices", y="samples/s", series=tuple(series))])


def scaling_json(rows: Sequence[Row], said: Sequence[str]) -> dict[str, Any]:
    """The rows as plain values: seconds, bytes, money."""
    return {
        "rows": [dataclasses.asdict(row) | {"money": row.money, "per_money": row.per_money} for row in rows], "answers": list(said)
    }  # fmt: skip
