"""A group's plot as SVG.

Predicted against measured, logarithmic, with the line of equality and a 10 % band.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from .scores import Group, Sample, Score

SIZE = 460
LEFT = 62
RIGHT = 14
TOP = 44
BOTTOM = 48
BAND = 0.1
COLOURS = ("#1f6fb4", "#c8451b", "#2c8a3d", "#7d52a8", "#b8860b", "#0f8f8f", "#a83279", "#555555")
PLACES = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
TICKS = 9
"""At most so many marks on an axis."""


def write_plots(folder: Path, groups: Sequence[Group], scores: Sequence[Score]) -> list[Path]:
    """One file for each group that has something to show."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for group, score in zip(groups, scores, strict=True):
        if score.n:
            path = folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', group.name).strip('-')}.svg"
            path.write_text(plot(group, score), encoding="utf-8")
            written.append(path)
    return written


def plot(group: Group, score: Score) -> str:
    """The plot of a group's timed rows; each dot names its row, and each sweep has its colour."""
    timed = [s for s in group.samples if s.timed]
    values = [value for s in timed for value in (s.measured, s.predicted) if value is not None]
    low = min(values) / 1.15
    high = max(values) * 1.15
    title = f"{group.name}: {score.n} rows" + (
        f", mean error {score.mean_error:.1%}" if score.mean_error is not None else ""
    )
    if score.null_error is not None:
        title += f", null {score.null_error:.1%}"
    axes = _Axes(low, high)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE}" height="{SIZE}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="13">{escape(title)}</text>',
        *axes.frame(group.unit),
        axes.band(),
        *_dots(timed, axes),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _dots(timed: Sequence[Sample], axes: _Axes) -> list[str]:
    sweeps = list(dict.fromkeys(s.sweep for s in timed))
    parts = []
    for s in timed:
        assert s.measured is not None and s.predicted is not None
        x = axes.x(s.measured)
        y = axes.y(s.predicted)
        colour = COLOURS[sweeps.index(s.sweep) % len(COLOURS)]
        told = escape(
            f"{s.label}: measured {s.measured:.4g}, predicted {s.predicted:.4g} "
            f"({s.predicted / s.measured - 1:+.1%})"
        )
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.7">'
        parts.append(f"{dot}<title>{told}</title></circle>")
    return parts


class _Axes:
    """Two equal logarithmic axes from `low` to `high`."""

    def __init__(self, low: float, high: float) -> None:
        self.low = low
        self.high = high

    def share(self, value: float) -> float:
        """The position of a value on an axis: 0 at its beginning, 1 at its end."""
        return math.log(value / self.low) / math.log(self.high / self.low)

    def x(self, value: float) -> float:
        return LEFT + self.share(value) * (SIZE - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return SIZE - BOTTOM - self.share(value) * (SIZE - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        """Round values inside the axes, every decade's alike."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for places in (PLACES, (1.0, 2.0, 5.0), (1.0,)):
            ticks = [place * 10.0**power for power in powers for place in places]
            inside = [value for value in ticks if self.low <= value <= self.high]
            if len(inside) <= TICKS:
                break
        return inside

    def frame(self, unit: str) -> list[str]:
        """Border, marks and names of the axes."""
        right = SIZE - RIGHT
        bottom = SIZE - BOTTOM
        parts = [
            f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}" '
            'fill="none" stroke="#888"/>'
        ]
        for value in self.ticks():
            x = self.x(value)
            y = self.y(value)
            parts.append(
                f'<path d="M{x:.1f} {TOP}V{bottom}M{LEFT} {y:.1f}H{right}" stroke="#e4e4e4" '
                'fill="none"/>'
            )
            parts.append(
                f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{value:.4g}</text>'
            )
            parts.append(
                f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
            )
        parts.append(
            f'<text x="{(LEFT + right) / 2}" y="{SIZE - 10}" text-anchor="middle">measured '
            f"({escape(unit)})</text>"
        )
        middle = (TOP + bottom) / 2
        turned = f'transform="rotate(-90 14 {middle})"'
        parts.append(
            f'<text x="14" y="{middle}" text-anchor="middle" {turned}>predicted '
            f"({escape(unit)})</text>"
        )
        return parts

    def band(self) -> str:
        """The line of equality in its band, both cut at the frame."""
        up = 1.0 + BAND
        down = 1.0 - BAND
        corners = [
            (self.low, self.low),
            (self.low, self.low * up),
            (self.high / up, self.high),
            (self.high, self.high),
            (self.high, self.high * down),
            (self.low / down, self.low),
        ]
        points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in corners)
        a = (self.x(self.low), self.y(self.low))
        b = (self.x(self.high), self.y(self.high))
        line = (
            f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" stroke="#555" '
            'stroke-dasharray="4 3"/>'
        )
        return f'<polygon points="{points}" fill="#9bc4e8" fill-opacity="0.35"/>\n{line}'


BAR = 16
WIDTH = 640
NAMES = 190
SCALE = 0.4
"""Height of a bar, width of the picture and of its names, and the error at its right edge."""


def leaderboard(groups: Sequence[Group], scores: Sequence[Score]) -> str:
    """Mean errors of all groups as bars, the smallest first, each marked with its null model's."""
    pairs = zip(groups, scores, strict=True)
    rows = sorted(
        (
            (s.mean_error, s.null_error, g.name, s.n)
            for g, s in pairs
            if s.mean_error is not None and s.null_error is not None
        )
    )
    height = (BAR + 6) * len(rows) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{NAMES}" y="18">mean error of predicted steps (bar), of a constant rate (mark; '
        "beyond the edge: arrow)</text>",
    ]
    for index, (error, null, name, count) in enumerate(rows):
        y = 30 + index * (BAR + 6)
        parts += [
            f'<text x="{NAMES - 8}" y="{y + 12}" text-anchor="end">{escape(name)} ({count})</text>',
            f'<rect x="{NAMES}" y="{y}" width="{_across(error):.1f}" height="{BAR}" '
            f'fill="{COLOURS[0]}"/>',
            f'<text x="{NAMES + _across(error) + 4:.1f}" y="{y + 12}">{error:.1%}</text>',
        ]
        mark = NAMES + _across(null)
        parts.append(
            f'<path d="M{mark:.1f} {y - 2}v{BAR + 4}" stroke="{COLOURS[1]}" stroke-width="2"/>'
        )
        if null > SCALE:
            parts.append(
                f'<text x="{mark + 2:.1f}" y="{y + 12}" fill="{COLOURS[1]}">&#8594; '
                f"{null:.0%}</text>"
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _across(error: float) -> float:
    return min(error, SCALE) / SCALE * (WIDTH - NAMES - 60)
