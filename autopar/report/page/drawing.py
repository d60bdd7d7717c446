"""Pictures of the report as SVG: stacked bars with limits and intervals, and a timeline.

All texts are escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from autopar.printable import printable
from autopar.units import seconds_text

from .shapes import WIDTH, Picture, line, nothing, picture, rectangle, short, text
from .spans import Span, Timeline, joined

LABEL = 190
ROW = 26
LETTER = 6.5
"""The width of the names, the height of a row, and the mean width of a letter, in pixels."""
# The first seven are those of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#999999",
    "#6a51a3",
    "#8c6d31",
)
KINDS = {
    "forward": "#a6d3f2",
    "backward": "#5aa0d8",
    "update": "#4dbb95",
    "collective": "#e69f00",
    "waiting": "#dddddd",
}
WAITING = "waiting"
LETTERS = {"forward": "F", "backward": "B", "update": "U", "collective": "C"}
MOST_SPANS = 60_000
"""The most spans that a page holds one by one, for its script to draw larger: about a megabyte."""
UNITS = 10_000_000
"""The number of parts of a step in which starts and lengths of spans are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row: its parts as (name, value, text), and the interval of nine measurements in ten."""

    name: str
    parts: tuple[tuple[str, float, str], ...]
    text: str
    interval: tuple[float, float] | None = None


def bars(
    rows: Sequence[Bar], label: str, *, limit: tuple[float, str] | None = None, alike: bool = False
) -> Picture:
    """Stacked bars on one scale, with a line at the `limit`.

    There is no legend if all parts are `alike`.
    """
    names = list(dict.fromkeys(name for row in rows for name, _, _ in row.parts))
    tops = [
        max(sum(v for _, v, _ in row.parts), row.interval[1] if row.interval else 0.0)
        for row in rows
    ]
    # A limit far above the bars is left out: on its scale they would be too short to compare.
    top = max([*tops, limit[0] if limit and limit[0] < 4 * max(tops, default=0.0) else 0.0])
    if not top > 0:
        return nothing(label)

    beside = max([130.0, *(LETTER * len(row.text) + 12 for row in rows)])

    def length(value: float) -> float:
        return value / top * (WIDTH - LABEL - beside)

    legend = [] if alike else names
    colours = {name: COLOURS[0 if alike else i % len(COLOURS)] for i, name in enumerate(names)} | {
        WAITING: KINDS["waiting"]
    }
    height = ROW * (len(rows) + len(legend[::4])) + (30 if limit else 6)
    out: list[Markup] = []
    for index, name in enumerate(legend):
        x = LABEL + index % 4 * 190.0
        y = float(ROW * (index // 4))
        out.append(rectangle(x, y + 6, 12, 12, colours[name], name))
        out.append(text(x + 17, y + 16, name))
    start = ROW * len(legend[::4])
    for number, row in enumerate(rows):
        out += _bar(row, float(start + number * ROW), length, colours, named=not alike)
    if limit and limit[0] <= top:
        x = LABEL + length(limit[0])
        out.append(
            line(x, start, x, height - 18, style="dashed")
            + text(x, height - 4, limit[1], anchor="middle")
        )
    return picture(label, (WIDTH, height), out)


def _bar(
    row: Bar, y: float, length: Callable[[float], float], colours: Mapping[str, str], *, named: bool
) -> Iterator[Markup]:
    """One row from `y` downwards; `length`: the length of a value in the picture.

    If `named`, parts with enough room carry their names, so that the bar is read without colours.
    """
    end = 0.0
    yield text(LABEL - 6, y + 17, short(row.name), anchor="end")
    for name, value, said in row.parts:
        width = length(value)
        if value > 0:
            title = f"{row.name}: {name} {said}"
            yield rectangle(LABEL + end, y + 3, width, ROW - 8, colours[name], title)
            if named and width > LETTER * len(name) + 4:
                yield text(LABEL + end + width / 2, y + 16, name, anchor="middle", over=True)
        end += width
    if row.interval:
        low, high = (LABEL + length(value) for value in row.interval)
        yield (
            line(low, y + 12, high, y + 12)
            + line(low, y + 7, low, y + 17)
            + line(high, y + 7, high, y + 17)
        )
        end = max(end, high - LABEL)
    yield text(LABEL + end + 6, y + 17, row.text)


def timeline(played: Timeline, label: str) -> Picture:
    """The lanes of a step, one under the other, with letters in spans with enough room.

    Spans too short to see are drawn as one. If there is room for all of them, the picture holds
    them one by one, and the page's script draws any part of the step from that.
    """
    if not played.seconds > 0:
        return nothing(label)
    height = ROW * (len(played.lanes) + 1) + 24
    room = WIDTH - LABEL - 10
    held = sum(len(lane.spans) for lane in played.lanes) <= MOST_SPANS
    names = dict.fromkeys(span.name for lane in played.lanes for span in lane.spans)
    places = {name: place for place, name in enumerate(names)}
    out: list[Markup] = []
    for index, (kind, colour) in enumerate(KINDS.items()):
        x = LABEL + index * 130.0
        out.append(
            rectangle(x, 4, 12, 12, colour, kind)
            + text(x + 17, 14, f"{LETTERS.get(kind, '')} {kind}")
        )
    for number, lane in enumerate(played.lanes):
        y = ROW * (number + 1.0)
        out.append(text(LABEL - 6, y + 15, short(lane.name), anchor="end"))
        written = _written(lane.spans, played.seconds, places) if held else ""
        out.append(Markup('<g class="lane" data-top="{:.1f}" data-spans="{}">').format(y, written))
        for span in joined(lane.spans, played.seconds):
            x = LABEL + span.start / played.seconds * room
            width = (span.end - span.start) / played.seconds * room
            out.append(rectangle(x, y + 2, width, ROW - 6, KINDS.get(span.kind, "#999999")))
            if width > 14 and span.kind in LETTERS:
                out.append(
                    text(x + width / 2, y + 16, LETTERS[span.kind], anchor="middle", over=True)
                )
        out.append(Markup("</g>"))
    out.append(Markup('<g class="ticks">'))
    for tick in range(6):
        x = LABEL + tick / 5 * room
        said = seconds_text(played.seconds * tick / 5)
        out.append(text(x, height - 4, said, anchor="middle" if tick < 5 else "end"))
    out.append(Markup("</g>"))
    told = "\n".join(printable(name, lines=False) for name in names) if held else ""
    whole = Markup(
        '<g class="played" data-seconds="{}" data-room="{} {}" data-kinds="{}" data-names="{}">'
    ).format(played.seconds, LABEL, room, " ".join(KINDS.values()), told)
    return picture(label, (WIDTH, height), [whole, *out, Markup("</g>")])


def _written(spans: Sequence[Span], seconds: float, places: Mapping[str, int]) -> str:
    """Spans as a text: of each the gap before it, its length, its kind and its name, as numbers.

    Gaps and lengths are parts of the step; a name is its place among the names.
    """
    kinds = list(KINDS)
    words = []
    at = 0
    for span in spans:
        start = round(span.start / seconds * UNITS)
        end = round(span.end / seconds * UNITS)
        words.append(f"{start - at},{end - start},{kinds.index(span.kind)},{places[span.name]}")
        at = end
    return ";".join(words)
