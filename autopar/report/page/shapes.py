"""The shapes of the report's pictures, as SVG with escaped texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from autopar.printable import printable

WIDTH = 960
HEAD = 7.0
RIMMED = 3.0
"""The least width of a rectangle with a rim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawing and its description; false if there is nothing to draw."""

    told: str
    svg: Markup

    def __bool__(self) -> bool:
        return bool(self.svg)


def picture(
    told: str, size: tuple[float, float], shapes: Iterable[Markup], *, role: str = "img"
) -> Picture:
    """A picture of shapes, of a width and a height."""
    return Picture(
        told=told,
        svg=Markup("\n").join([_opened(size[1], told, size[0], role), *shapes, Markup("</svg>")]),
    )


def nothing(told: str) -> Picture:
    """An empty picture with its description."""
    return Picture(told=told, svg=Markup(""))


def _opened(height: float, label: str, width: float, role: str) -> Markup:
    """The start of a picture, with its label for screen readers."""
    shape = Markup(
        '<svg viewBox="0 0 {:.0f} {:.0f}" width="{:.0f}" height="{:.0f}" role="{}" aria-label="{}">'
    )
    return shape.format(width, height, width, height, role, printable(label, lines=False))


def rectangle(
    x: float, y: float, width: float, height: float, colour: str, title: str = ""
) -> Markup:
    """A filled rectangle; its title is shown under the mouse."""
    # The rim parts neighbours; it would cover most of a narrow one.
    rim = Markup(' stroke="#fff" stroke-width=".4"') if width > RIMMED else Markup("")
    shape = Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}"{}').format(
        x, y, max(width, 0.3), height, colour, rim
    )
    return shape + (
        Markup("><title>{}</title></rect>").format(printable(title, lines=False))
        if title
        else Markup("/>")
    )


def text(x: float, y: float, said: str, *, anchor: str = "start", over: bool = False) -> Markup:
    """A line of text, with a white rim if it is `over` a colour."""
    rim = Markup(' class="over"') if over else Markup("")
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>').format(
        x, y, anchor, rim, printable(said, lines=False)
    )


# The style sheet knows these two, and has others for dark screens.
COLOURS_OF_LINES = {"solid": "#111", "dashed": "#767676", "arrow": "#767676", "faint": "#ddd"}


def line(
    x0: float,
    y0: float,
    x1: float,
    y1: float,
    *,
    style: Literal["solid", "dashed", "faint"] = "solid",
    arrow: bool = False,
) -> Markup:
    """A straight line, with an arrow's head at its end if wanted."""
    dash = Markup(' stroke-dasharray="4 3"') if style == "dashed" else Markup("")
    colour = COLOURS_OF_LINES["arrow" if arrow else style]
    drawn = Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="{}"{}/>').format(
        x0, y0, x1, y1, colour, dash
    )
    return drawn + _head(x0, y0, x1, y1, colour) if arrow else drawn


def _head(x0: float, y0: float, x1: float, y1: float, colour: str) -> Markup:
    """A triangle in the direction of a line."""
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    dx = (x1 - x0) / length * HEAD
    dy = (y1 - y0) / length * HEAD
    points = ((x1, y1), (x1 - dx - dy / 2, y1 - dy + dx / 2), (x1 - dx + dy / 2, y1 - dy - dx / 2))
    return Markup('<polygon points="{}" fill="{}"/>').format(
        " ".join(f"{x:.1f},{y:.1f}" for x, y in points), colour
    )


def short(said: str, most: int = 28) -> str:
    """A text shortened to so many characters."""
    return said if len(said) <= most else said[: most - 1] + "…"
