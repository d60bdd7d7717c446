"""The scaling of a model over clusters and devices as a table, sentences, a plot and an object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from autopar.analysis.searches.scaling import Row
from autopar.report.plot import Panel, Series, svg
from autopar.report.tables import Table
from autopar.units import amount_text, bytes_text, seconds_text


def scaling_table(rows: Sequence[Row]) -> Table:
    """The rows, with money where prices are known."""
    priced = any(row.price is not None for row in rows)
    more = (">cost", ">per money") if priced else (">memory",)
    columns = ("cluster", ">devices", ">step", ">per second", ">eff.", *more, "plan")
    cells = tuple(_cells(row, priced=priced) for row in rows)
    money = "; cost of a step; samples per unit of money" if priced else ""
    title = (
        "The best plan by cluster and devices, of one global batch: samples per second; "
        f"efficiency{money}"
    )
    return Table(title=title, columns=columns, rows=cells)


def _cells(row: Row, *, priced: bool) -> tuple[str, ...]:
    head = (row.cluster, str(row.devices))
    if row.step is None:
        return (*head, *[""] * (5 if priced else 4), row.why)
    efficiency = f"{row.efficiency:.0%}" if row.efficiency is not None else ""
    figures = (seconds_text(row.step), amount_text(row.batch / row.step), efficiency)
    money = (
        f"{row.money:.3g}" if row.money else "",
        f"{row.per_money:.3g}" if row.per_money else "",
    )
    return (*head, *figures, *(money if priced else (bytes_text(row.memory),)), row.named)


def answers(rows: Sequence[Row], step: float | None, per_money: float | None) -> list[str]:
    """The fastest, and the cheapest for the targets, in sentences."""
    planned = [row for row in rows if row.step is not None]
    if not planned:
        return ["no plan fits on any of them"]
    fastest = min(planned, key=lambda row: row.step or 0.0)
    said = [f"fastest: {_place(fastest)}"]
    priced = [row for row in planned if row.money is not None]
    if priced:
        said.append(
            "most samples for the money: "
            f"{_place(max(priced, key=lambda row: row.per_money or 0.0))}"
        )
    if step is not None:
        within = [row for row in planned if row.step is not None and row.step <= step]
        unpriced = min(within, key=lambda row: (row.devices, row.step), default=None)
        cheapest = min(
            (row for row in within if row.price is not None),
            key=lambda row: row.devices * (row.price or 0.0),
            default=unpriced,
        )
        what = (
            "by the hour" if cheapest is not None and cheapest.price is not None else "in devices"
        )
        said.append(
            f"cheapest {what} within {seconds_text(step)} a step: "
            f"{_place(cheapest) if cheapest else 'none of them'}"
        )
    if per_money is not None:
        enough = [row for row in priced if (row.per_money or 0.0) >= per_money]
        best = min(enough, key=lambda row: row.step or 0.0, default=None)
        said.append(
            f"fastest with {per_money:g} samples for a unit of money: "
            f"{_place(best) if best else 'none of them'}"
        )
    return said


def _place(row: Row) -> str:
    assert row.step is not None
    money = f", {row.money:.3g} a step" if row.money else ""
    return (
        f"{row.devices} device{'s' if row.devices > 1 else ''} of {row.cluster}, "
        f"{seconds_text(row.step)} a step{money}"
    )


def scaling_plot(rows: Sequence[Row]) -> str:
    """Samples a second over devices: a line for each cluster, and one of perfect scaling."""
    series: list[Series] = []
    for colour, cluster in enumerate(dict.fromkeys(row.cluster for row in rows)):
        points = tuple(
            (float(row.devices), row.batch / row.step)
            for row in rows
            if row.cluster == cluster and row.step
        )
        if points:
            ideal = tuple((devices, points[0][1] * devices / points[0][0]) for devices, _ in points)
            series.append(Series(name=cluster, points=points, colour=colour, joined=True))
            series.append(Series(name="", points=ideal, colour=7, joined=True))
    return svg(
        [
            Panel(
                title="samples a second over devices; grey: perfect scaling",
                x="devices",
                y="samples/s",
                series=tuple(series),
            )
        ]
    )


def scaling_json(rows: Sequence[Row], said: Sequence[str]) -> dict[str, Any]:
    """The rows as plain values: seconds, bytes, money."""
    return {
        "rows": [
            dataclasses.asdict(row) | {"money": row.money, "per_money": row.per_money}
            for row in rows
        ],
        "answers": list(said),
    }
