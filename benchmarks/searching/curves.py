"""Scaling: CPU seconds of tables and search over layers, devices and axes of one transformer.

Over layers there are two curves: `layers`, the whole graph, and `folded`, the graph with its equal
layers folded. The planner searches the latter, which does not grow with the layers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from autopar.report.plot import Panel, Series
from autopar.search import distinct_joins, forget_orders, solve

from .models import analysed, cost_graph, folded, llama3_8b, shaped
from .rivals import Row, timed

FOLDED = "folded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One search: `cold` with the order of elimination, `warm` with that known.

    `joins` are its distinct tables.
    """

    curve: str
    at: int
    mesh: str
    variables: int
    joins: int
    tables_s: float
    cold_s: float
    warm_s: float
    gap: float

    def as_json(self) -> dict[str, Any]:
        """The point as plain data."""
        return asdict(self)


def points(*, quick: bool) -> Iterator[Point]:
    """The curves: layers on 8 x 8, whole and folded, devices on two axes, axes of four devices."""
    depth = 32 if quick else 256
    for curve in ("layers", FOLDED):
        for layers in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            if layers <= depth:
                yield point(curve, layers, layers, (8, 8))
    for nodes in (1, 2, 4, 16, 64, 256, 1024, 4096, 16384)[: 4 if quick else None]:
        yield point("devices", 8 * nodes, 2 if quick else 32, (nodes, 8) if nodes > 1 else (8,))
    for axes in range(1, 3 if quick else 4):
        yield point("axes", axes, 2 if quick else 32, (4,) * axes)


def point(curve: str, at: int, layers: int, sizes: tuple[int, ...]) -> Point:
    """One search from a cold start, and again."""
    whole = shaped(llama3_8b(layers), batch=64)
    analysis, work = folded(whole) if curve == FOLDED else (analysed(whole), None)
    tables_s, graph = timed(partial(cost_graph, analysis, sizes, work))
    forget_orders()
    cold_s, solution = timed(partial(solve, graph))
    warm_s, _ = timed(partial(solve, graph))
    return Point(
        curve=curve,
        at=at,
        mesh="x".join(map(str, sizes)),
        variables=len(graph.sizes),
        joins=distinct_joins(graph),
        tables_s=tables_s,
        cold_s=cold_s,
        warm_s=warm_s,
        gap=solution.gap,
    )


def _dots(rows: list[Row], rival: str, floor: float) -> tuple[tuple[float, float], ...]:
    """Our seconds and the rival's."""
    return tuple(
        (max(row.ours_s, floor), max(row.rival_s, floor))
        for row in rows
        if row.rival == rival and row.rival_s is not None
    )


def panels(rows: list[Row], points: list[Point]) -> list[Panel]:
    """The plots: each rival's seconds against ours, and the curves."""
    floor = time.get_clock_info("process_time").resolution
    drawn = []
    rivals = sorted({row.rival for row in rows if row.rival_s is not None})
    dots = [
        Series(name=rival, colour=i, points=_dots(rows, rival, floor))
        for i, rival in enumerate(rivals)
    ]
    ours = [row.ours_s for row in rows]
    if ours:
        low = max(min(ours), floor)
        high = max(ours)
        dots.append(
            Series(name="as fast", colour=7, joined=True, points=((low, low), (high, high)))
        )
        dots.append(
            Series(
                name="100 times ours",
                colour=6,
                joined=True,
                points=((low, 100 * low), (high, 100 * high)),
            )
        )
        drawn.append(
            Panel(title="CPU seconds of the rivals", x="ours", y="rival", series=tuple(dots))
        )
    curves = {
        curve: [point for point in points if point.curve == curve]
        for curve in dict.fromkeys(point.curve for point in points)
    }
    beside = _lines(curves.pop(FOLDED, []), floor, " (folded)", first=3)[:2]
    for curve, mine in curves.items():
        series = _lines(mine, floor) + (beside if curve == "layers" else ())
        drawn.append(Panel(title=f"CPU seconds over {curve}", x=curve, y="s", series=series))
        if curve == "layers":
            joins = Series(
                name="distinct joins",
                joined=True,
                points=tuple((float(p.at), float(p.joins)) for p in mine),
            )
            drawn.append(
                Panel(title="distinct joins over layers", x=curve, y="joins", series=(joins,))
            )
    return drawn


def _lines(points: list[Point], floor: float, note: str = "", first: int = 0) -> tuple[Series, ...]:
    """The seconds of a curve, part by part; `first`: the number of its first colour."""
    parts = {
        "tables": [p.tables_s for p in points],
        "search, first": [p.cold_s for p in points],
        "search, again": [p.warm_s for p in points],
    }
    return tuple(
        Series(
            name=name + note,
            colour=first + i,
            joined=True,
            points=tuple(
                (float(p.at), max(s, floor)) for p, s in zip(points, seconds, strict=True)
            ),
        )
        for i, (name, seconds) in enumerate(parts.items())
        if points
    )
