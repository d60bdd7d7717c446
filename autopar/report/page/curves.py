"""The report's section of sensitivity: curves of the best plan's step, and its flips."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from autopar.analysis.searches.curves import Curve, Point
from autopar.report.tables import Table
from autopar.units import amount_text, seconds_text

from .section import Section
from .shapes import Picture, line, nothing, picture, short, text

WIDE = 440.0
HIGH = 220.0
LEFT = 70.0
TOP = 30.0
ACROSS = 2
"""The width and height of a panel, the margins of its axes, and the number of panels in a row."""
NARROW = 90.0


def sensitivity(curves: Sequence[Curve], plan_step: float) -> Section:
    """The section; every quantity is scaled alone, with a new search at every point."""
    told = [
        "Each figure is scaled alone and the model planned anew, with nothing pinned; the plan's "
        f"step takes {seconds_text(plan_step)}.",
        "A label marks where the best plan becomes another; a cross, where no plan fits.",
    ]
    tables = tuple(_table(curve) for curve in curves)
    told += [said for curve in curves if (said := _said(curve))]
    return Section(
        anchor="sensitivity",
        title="What if",
        told=tuple(told),
        pictures=(panels(curves),),
        tables=tables,
    )


def _said(curve: Curve) -> str:
    """The effect of doubling and halving, in a sentence."""
    steps = {point.factor: point.step for point in curve.points}
    here = steps.get(1.0)
    if not here:
        return ""
    said = [
        f"{words} makes a step {step / here:.2f} times as long"
        for factor, words in ((2.0, "twice as much"), (0.5, "half of it"))
        if (step := steps.get(factor)) is not None
    ]
    return f"{curve.quantity}: {', '.join(said)}." if said else ""


def _table(curve: Curve) -> Table:
    here = next((point.step for point in curve.points if point.factor == 1.0), None)
    rows = tuple(_row(point, here) for point in curve.points)
    columns = (
        ">factor",
        f">{curve.quantity}",
        ">step",
        ">change",
        ">samples a second",
        "best plan",
    )
    return Table(title=f"Step over {curve.quantity}", columns=columns, rows=rows)


def _row(point: Point, here: float | None) -> tuple[str, ...]:
    if point.step is None:
        return (f"{point.factor:g}x", point.value, "", "", "", point.named)
    change = f"{point.step / here - 1:+.1%}" if here else ""
    rate = amount_text(point.batch / point.step) if point.batch else ""
    return (f"{point.factor:g}x", point.value, seconds_text(point.step), change, rate, point.named)


def panels(curves: Sequence[Curve]) -> Picture:
    """A panel for each curve, all on one scale of seconds."""
    told = "Seconds of the best plan's step as each figure is scaled, both on logarithmic scales"
    steps = [point.step for curve in curves for point in curve.points if point.step]
    if not steps:
        return nothing(told)
    low = math.log(min(steps) / 1.15)
    high = math.log(max(steps) * 1.15)
    out: list[Markup] = []
    for number, curve in enumerate(curves):
        left = number % ACROSS * (WIDE + NARROW)
        top = number // ACROSS * (HIGH + 60)
        out += _panel(curve, left + LEFT, top + TOP, low, high)
    rows = -(-len(curves) // ACROSS)
    return picture(told, (ACROSS * (WIDE + NARROW), rows * (HIGH + 60) + 10), out)


def _panel(curve: Curve, left: float, top: float, low: float, high: float) -> list[Markup]:
    factors = [point.factor for point in curve.points]
    first = math.log(min(factors))
    last = math.log(max(factors))

    def x(factor: float) -> float:
        return left + (math.log(factor) - first) / (last - first or 1.0) * (WIDE - LEFT)

    def y(step: float) -> float:
        return top + (high - math.log(step)) / (high - low) * HIGH

    out = [
        text(left, top - 10, curve.quantity),
        line(left, top, left, top + HIGH),
        line(left, top + HIGH, x(factors[-1]), top + HIGH),
    ]
    for mark in range(4):
        step = math.exp(low + (high - low) * mark / 3)
        out.append(text(left - 6, y(step) + 4, seconds_text(step), anchor="end"))
        out.append(line(left, y(step), x(factors[-1]), y(step), style="faint"))
    last_point: Point | None = None
    for point in curve.points:
        out.append(text(x(point.factor), top + HIGH + 16, point.value, anchor="middle"))
        if point.step is None:
            out.append(text(x(point.factor), top + HIGH - 6, "✕", anchor="middle"))
            last_point = None
            continue
        if last_point is not None and last_point.step is not None:
            out.append(
                line(x(last_point.factor), y(last_point.step), x(point.factor), y(point.step))
            )
        if last_point is None or point.named != last_point.named:
            side, shift = ("end", -6) if point.factor > 1 else ("start", 6)
            out.append(
                text(x(point.factor) + shift, y(point.step) - 8, _called(point), anchor=side)
            )
        out.append(_dot(x(point.factor), y(point.step)))
        last_point = point
    return out


def _called(point: Point) -> str:
    """The plan's name, shortened to the room for it."""
    return short(point.named.removeprefix("no known scheme (").removesuffix(")"), 22)


def _dot(x: float, y: float) -> Markup:
    return Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3.5" fill="#0072b2"/>').format(x, y)
