"""Communication in the report: by axis, by level of the cluster, and by pairs of devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.analysis.program.account import Account
from autopar.analysis.program.exchanges import (
    Exchanges,
    Issued,
    Total,
    exchanges,
    issued_by,
    levels_of,
    totals,
)
from autopar.analysis.program.hiding import Hidden, hidden_of
from autopar.analysis.program.strategy_words import COLLECTIVES
from autopar.costmodel import Cluster
from autopar.plan import Plan
from autopar.report.tables import Table
from autopar.units import bytes_text, seconds_text

from .drawing import Bar, bars
from .section import Section, share
from .shapes import WIDTH, Picture, line, nothing, picture, rectangle, text

LARGEST = 22.0
"""The most pixels of a cell of the matrix."""
MOST_CELLS = 12
"""The most rows of a matrix that its table shows whole."""
MOST_PAIRS = 60
"""The most pairs in the table of a larger matrix."""
ROOM = 640.0
"""Pixels of the whole matrix."""


def communication(plan: Plan, account: Account | None, cluster: Cluster | None) -> Section:
    """The section of communication: by axis, level, phase and kind, and by pairs.

    From the plan file with stages, it is of one micro-batch.
    """
    issued = issued_by(plan, account)
    summed = totals_of(issued)
    drawn = []
    for axis, level in levels_of(plan, summed).items():
        held = [one for one in summed if one.axis == axis]
        parts = tuple(
            (f"{COLLECTIVES.get(s.kind, s.kind)}, {s.phase}", s.seconds, seconds_text(s.seconds))
            for s in held
        )
        drawn.append(
            Bar(
                name=f"{axis} ({level})",
                parts=parts,
                text=seconds_text(sum(value for _, value, _ in parts)),
            )
        )
    told = [counted(plan, account)]
    pairs = exchanges(plan, issued, cluster)
    if pairs.matrix.any():
        told += _told(pairs, plan)
    else:
        told.append("Nothing is communicated.")
    pictures = (
        bars(drawn, "Seconds of communication by mesh axis"),
        _level_bars(pairs),
        matrix(pairs, plan.devices),
    )
    hidden = (
        hidden_of(plan, account.analysis, cluster)
        if account is not None and cluster is not None
        else None
    )
    if hidden is not None:
        told.append("Hidden is the share of a transfer's time in which the device computes.")
    tables = (
        axes_table(plan, summed, hidden),
        _level_table(pairs),
        pair_table(pairs, plan.devices),
    )
    return Section(
        anchor="communication",
        title="Communication",
        told=tuple(told),
        pictures=pictures,
        tables=tables,
    )


def totals_of(issued: Sequence[Issued]) -> list[Total]:
    """The sums of collectives by axis, phase and kind."""
    return totals((one.axis, one.phase, one.kind, one.nbytes, one.seconds) for one in issued)


def is_whole(plan: Plan, account: Account | None) -> bool:
    """Whether the known collectives are those of a step, not of one micro-batch."""
    return account is not None or not plan.stages


def counted(plan: Plan, account: Account | None) -> str:
    """The part of a step that the collectives are of, in words."""
    return (
        "Collectives of a step."
        if is_whole(plan, account)
        else "Collectives of one micro-batch; --model counts those of a step."
    )


def axes_table(plan: Plan, summed: Sequence[Total], hidden: Hidden | None = None) -> Table:
    """The sums as rows, each with its hidden share if known."""
    levels = levels_of(plan, summed)
    rows: tuple[tuple[str, ...], ...] = tuple(
        (
            s.axis,
            levels.get(s.axis, ""),
            s.phase,
            COLLECTIVES.get(s.kind, s.kind),
            str(s.times),
            *_amounts(s),
        )
        for s in summed
    )
    columns: tuple[str, ...] = (
        "axis",
        "level",
        "phase",
        "collective",
        ">times",
        ">bytes",
        ">seconds",
    )
    if hidden is not None:
        shares = [hidden.of(s.axis, s.phase, s.kind) for s in summed]
        rows = tuple(
            (*row, "" if part is None else f"{part:.0%}")
            for row, part in zip(rows, shares, strict=True)
        )
        columns = (*columns, ">hidden")
    return Table(title="Collectives by axis and level", columns=columns, rows=rows)


def _amounts(summed: Total) -> tuple[str, str]:
    return bytes_text(summed.nbytes), seconds_text(summed.seconds)


def _told(exchanges: Exchanges, plan: Plan) -> list[str]:
    sent = exchanges.matrix.sum()
    mean = (
        f"A device sends {bytes_text(sent / plan.devices)} in a step on the average; all of them "
        f"{bytes_text(sent)}."
    )
    several = (
        f" Rows and columns stand for {exchanges.size} devices each." if exchanges.size > 1 else ""
    )
    how = (
        "In the matrix a square's area is what its row sends to its column, carried in rings, an "
        "all-to-all evenly." + several
    )
    return [mean, how]


def _level_bars(exchanges: Exchanges) -> Picture:
    told = "Bytes of all devices by level of the cluster"
    if len(exchanges.levels) < 2:
        return nothing(told)
    rows = [
        Bar(name=name, parts=((name, size, bytes_text(size)),), text=bytes_text(size))
        for name, size in exchanges.levels.items()
    ]
    return bars(rows, told, alike=True)


def _level_table(exchanges: Exchanges) -> Table:
    whole = sum(exchanges.levels.values())
    rows = tuple(
        (name, bytes_text(size), share(size, whole)) for name, size in exchanges.levels.items()
    )
    return Table(
        title="Bytes sent by level of the cluster, of all devices in a step",
        columns=("level", ">bytes", ">share"),
        rows=rows,
    )


def matrix(exchanges: Exchanges, devices: int) -> Picture:
    """Squares whose areas are proportional to the bytes from the row's devices to the column's."""
    count = len(exchanges.matrix)
    told = "Who sends to whom: rows send, columns receive, a square's area is the bytes"
    if not exchanges.matrix.any() or count < 2:
        return nothing(told)
    cell = min(LARGEST, ROOM / count)
    left = 90.0
    top = 46.0
    most = float(exchanges.matrix.max())
    # A label is 16 pixels high.
    every = max(1, int(np.ceil(16 / cell)))
    out = [text(left, 14, "receivers: devices") + text(4, top - 6, "senders")]
    for block in range(0, count, every):
        at = block * cell + cell / 2
        out.append(text(left - 6, top + at + 4, exchanges.name(block, devices), anchor="end"))
        # Above the columns there is less room: names of groups are wide.
        if block % (every * (1 if exchanges.size == 1 else 4)) == 0:
            out.append(
                text(
                    left + at,
                    top - 6,
                    exchanges.name(block, devices).partition("-")[0],
                    anchor="middle",
                )
            )
    for block in range(count + 1):
        out.append(
            line(left, top + block * cell, left + count * cell, top + block * cell, style="faint")
        )
        out.append(
            line(left + block * cell, top, left + block * cell, top + count * cell, style="faint")
        )
    for row, column in zip(*np.nonzero(exchanges.matrix), strict=True):
        size = float(exchanges.matrix[row, column])
        # The smallest amounts stay visible.
        side = max(cell * float(np.sqrt(size / most)), 1.5)
        x = left + column * cell + (cell - side) / 2
        y = top + row * cell + (cell - side) / 2
        source = exchanges.name(row, devices)
        target = exchanges.name(column, devices)
        title = f"{source} to {target}: {bytes_text(size)}"
        out.append(rectangle(x, y, side, side, "#0072b2", title))
    return picture(told, (WIDTH, top + count * cell + 8), out)


def pair_table(exchanges: Exchanges, devices: int) -> Table:
    """The matrix if it is small, else its largest entries."""
    names = [exchanges.name(block, devices) for block in range(len(exchanges.matrix))]
    if len(names) <= MOST_CELLS:
        rows = tuple(
            (name, *(bytes_text(size) if size else "-" for size in row))
            for name, row in zip(names, exchanges.matrix, strict=True)
        )
        columns = ("from \\ to", *(f">{name}" for name in names))
        return Table(
            title="Bytes sent from device to device in a step",
            columns=columns,
            rows=rows if exchanges.matrix.any() else (),
        )
    order = np.argsort(-exchanges.matrix, axis=None, kind="stable")[:MOST_PAIRS]
    places = [divmod(int(place), len(names)) for place in order]
    shown = tuple(
        (names[i], names[j], bytes_text(exchanges.matrix[i, j]))
        for i, j in places
        if exchanges.matrix[i, j]
    )
    return Table(
        title="The most that devices send to one another in a step",
        columns=("from", "to", ">bytes"),
        rows=shown,
    )
