"""Small SVG plots on logarithmic axes: panels of dots and lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 360
HEIGHT = 260
MARGIN = 52
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Positive points: dots, or a line if `joined`.

    A series without a name is not in the legend.
    """

    name: str
    points: tuple[Point, ...]
    colour: int = 0
    joined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]


def svg(panels: Sequence[Panel], *, columns: int = 3) -> str:
    """The panels in rows of `columns`.

    >>> line = Series(name="a", points=((1.0, 1.0), (100.0, 10.0)), joined=True)
    >>> svg([Panel(title="t", x="x", y="y", series=(line,))]).count("<polyline")
    1
    """
    columns = max(1, min(columns, len(panels)))
    rows = -(-len(panels) // columns)
    size = f'width="{columns * WIDTH}" height="{rows * HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">'
    ]
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        parts += [
            f'<g transform="translate({column * WIDTH},{row * HEIGHT})">',
            *_panel(panel),
            "</g>",
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> list[str]:
    points = [point for series in panel.series for point in series.points]
    if not points:
        return [f'<text x="{WIDTH / 2}" y="16" text-anchor="middle">{escape(panel.title)}</text>']
    (x0, x1), (y0, y1) = (_decades([p[axis] for p in points]) for axis in (0, 1))
    left = MARGIN
    right = WIDTH - 12
    top = 24
    bottom = HEIGHT - 36

    def place(point: Point) -> Point:
        across = (math.log10(point[0]) - x0) / (x1 - x0)
        up = (math.log10(point[1]) - y0) / (y1 - y0)
        return left + across * (right - left), bottom - up * (bottom - top)

    parts = [
        f'<text x="{(left + right) / 2}" y="16" text-anchor="middle" '
        f'font-size="12">{escape(panel.title)}</text>'
    ]
    parts.append(
        f'<text x="{(left + right) / 2}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{escape(panel.x)}</text>'
    )
    middle = (top + bottom) / 2
    parts.append(
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 '
        f'{middle})">{escape(panel.y)}</text>'
    )
    for power in range(x0, x1 + 1):
        x, _ = place((10.0**power, 10.0**y0))
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 13}" text-anchor="middle">1e{power}</text>')
    for power in range(y0, y1 + 1):
        _, y = place((10.0**x0, 10.0**power))
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 4}" y="{y + 3:.1f}" text-anchor="end">1e{power}</text>')
    for series in panel.series:
        parts += _drawn(series, [place(point) for point in series.points])
    named = [series for series in panel.series if series.name]
    for line, series in enumerate(named):
        colour = COLOURS[series.colour % len(COLOURS)]
        parts.append(
            f'<text x="{left + 6}" y="{top + 12 + 12 * line}" '
            f'fill="{colour}">{escape(series.name)}</text>'
        )
    return parts


def _drawn(series: Series, places: Sequence[Point]) -> list[str]:
    colour = COLOURS[series.colour % len(COLOURS)]
    if series.joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        return [f'<polyline points="{path}" fill="none" stroke="{colour}"/>']
    return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The exponents of the powers of ten around the values."""
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)
