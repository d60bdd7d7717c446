"""Pictures of the report as SVG: stacked bars with limits and intervals, and a timeline; all texts are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..units import seconds_text
from .shapes import WIDTH, Picture, line, nothing, picture, rectangle, short, text
from .spans import Timeline

LABEL, ROW, LETTER = 190, 26, 6.5
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999", "#6a51a3", "#8c6d31")
KINDS = {"forward": "#a6d3f2", "backward": "#5aa0d8", "update": "#4dbb95", "collective": "#e69f00", "waiting": "#dddddd"}
WAITING = "waiting or hidden"
LETTERS = {"forward": "F", "backward": "B", "update": "U", "collective": "C"}
MOST_TITLES = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row: its parts as (name, value, text), and the interval of nine measurements in ten."""

    name: str
    parts: tuple[tuple[str, float, str], ...]
    text: str
    interval: tuple[float, float] | None = None


def bars(rows: Sequence[Bar], label: str, *, limit: tuple[float, str] | None = None, alike: bool = False) -> Picture:
    """Stacked bars on one scale, with a line at the `limit`; without a legend if all parts are `alike`."""
    names = list(dict.fromkeys(name for row in rows for name, _, _ in row.parts))
    tops = [max(sum(v for _, v, _ in row.parts), row.interval[1] if row.interval else 0.0) for row in rows]
    top = max([*tops, limit[0] if limit and limit[0] < 4 * max(tops, default=0.0) else 0.0])
    if not top > 0:
        return nothing(label)
    room = WIDTH - LABEL - 130
    legend = [] if alike else names
    colours = {name: COLOURS[0 if alike else i % len(COLOURS)] for i, name in enumerate(names)} | {WAITING: KINDS["waiting"]}
    height = ROW * (len(rows) + len(legend[::4])) + (30 if limit else 6)
    out: list[Markup] = []
    for index, name in enumerate(legend):
        x, y = LABEL + index % 4 * 190.0, float(ROW * (index // 4))
        out.append(rectangle(x, y + 6, 12, 12, colours[name], name))
        out.append(text(x + 17, y + 16, name))
    start = ROW * len(legend[::4])
    for number, row in enumerate(rows):
        y, at = float(start + number * ROW), 0.0
        out.append(text(LABEL - 6, y + 17, short(row.name), anchor="end"))
        for name, value, said in row.parts:
            width = value / top * room
            if value > 0:
                out.append(rectangle(LABEL + at, y + 3, width, ROW - 8, colours[name], f"{row.name}: {name} {said}"))
                if not alike and width > LETTER * len(name) + 4:  # read without colour
                    out.append(text(LABEL + at + width / 2, y + 16, name, anchor="middle", over=True))
            at += width
        if row.interval:
            low, high = (LABEL + value / top * room for value in row.interval)
            out.append(line(low, y + 12, high, y + 12) + line(low, y + 7, low, y + 17) + line(high, y + 7, high, y + 17))
            at = max(at, high - LABEL)
        out.append(text(LABEL + at + 6, y + 17, row.text))
    if limit and limit[0] <= top:
        x = LABEL + limit[0] / top * room
        out.append(line(x, start, x, height - 18, dashed=True) + text(x, height - 4, limit[1], anchor="middle"))
    return picture(label, (WIDTH, height), out)


def timeline(found: Timeline, label: str) -> Picture:
    """The lanes of a step, one under the other, with letters in spans with enough room."""
    if not found.seconds > 0:
        return nothing(label)
    height = ROW * (len(found.lanes) + 1) + 24
    room, titled = WIDTH - LABEL - 10, sum(len(lane.spans) for lane in found.lanes) <= MOST_TITLES
    out: list[Markup] = []
    for index, (kind, colour) in enumerate(KINDS.items()):
        x = LABEL + index * 130.0
        out.append(rectangle(x, 4, 12, 12, colour, kind) + text(x + 17, 14, f"{LETTERS.get(kind, '')} {kind}"))
    for number, lane in enumerate(found.lanes):
        y = ROW * (number + 1.0)
        out.append(text(LABEL - 6, y + 15, short(lane.name), anchor="end"))
        for span in lane.spans:
            x, width = LABEL + span.start / found.seconds * room, (span.end - span.start) / found.seconds * room
            told = f"{lane.name}: {span.name}, {seconds_text(span.end - span.start)} from {seconds_text(span.start)}" if titled else ""
            out.append(rectangle(x, y + 2, width, ROW - 6, KINDS.get(span.kind, "#999999"), told))
            if width > 14 and span.kind in LETTERS:
                out.append(text(x + width / 2, y + 16, LETTERS[span.kind], anchor="middle"))
    for tick in range(6):
        x = LABEL + tick / 5 * room
        out.append(text(x, height - 4, seconds_text(found.seconds * tick / 5), anchor="middle" if tick < 5 else "end"))
    return picture(label, (WIDTH, height), out)
