"""Communication in the report: seconds by axis, bytes by level of the cluster, and a matrix of who sends to whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.costmodel import Cluster

from ...plan import Plan
from ..account import Account
from ..hiding import Hidden, hidden_of
from ..tables import Table
from ..units import bytes_text, seconds_text
from ..words import COLLECTIVES
from .drawing import Bar, bars
from .exchanges import Exchanges, Issued, Total, exchanges, issued_by, levels_of, totals
from .section import Section, share
from .shapes import WIDTH, Picture, line, nothing, picture, rectangle, text

LARGEST, MOST_CELLS, MOST_PAIRS = 22.0, 12, 60
"""Pixels of a cell; the most rows of a matrix that its table shows whole; the most pairs of a larger one's table."""
ROOM = 640.0


def communication(plan: Plan, account: Account | None, cluster: Cluster | None) -> Section:
    """The section: by axis, level, phase and kind, and by pairs; from the plan file with stages, of one micro-batch."""
    issued = issued_by(plan, account)
    summed = totals_of(issued)
    drawn = []
    for axis, level in levels_of(plan, summed).items():
        held = [one for one in summed if one.axis == axis]
        parts = tuple((f"{COLLECTIVES.get(s.kind, s.kind)}, {s.phase}", s.seconds, seconds_text(s.seconds)) for s in held)
        drawn.append(Bar(name=f"{axis} ({level})", parts=parts, text=seconds_text(sum(value for _, value, _ in parts))))
    told = [counted(plan, account)]
    pairs = exchanges(plan, issued, cluster)
    told += _told(pairs, plan) if pairs.matrix.any() else ["Nothing is communicated."]
    pictures = (bars(drawn, "Seconds of communication by mesh axis"), _level_bars(pairs), matrix(pairs, plan.devices))
    hidden = hidden_of(plan, account.analysis, cluster) if account is not None and cluster is not None else None
    told += ["Hidden is the share of a transfer's time in which the device computes."] if hidden is not None else []
    tables = (axes_table(plan, summed, hidden), _level_table(pairs), pair_table(pairs, plan.devices))
    return Section(anchor="communication", title="Communication", told=tuple(told), pictures=pictures, tables=tables)


def totals_of(issued: Sequence[Issued]) -> list[Total]:
    """The sums of collectives by axis, phase and kind."""
    return totals((one.axis, one.phase, one.kind, one.nbytes, one.seconds) for one in issued)


def is_whole(plan: Plan, account: Account | None) -> bool:
    """Whether the known collectives are those of a step, not of one micro-batch."""
    return account is not None or not plan.stages


def counted(plan: Plan, account: Account | None) -> str:
    """The part of a step that the collectives are of, in words."""
    return "Collectives of a step." if is_whole(plan, account) else "Collectives of one micro-batch; --model counts those of a step."


def axes_table(plan: Plan, summed: Sequence[Total], hidden: Hidden | None = None) -> Table:
    """The sums as rows, each with its hidden share if known."""
    levels = levels_of(plan, summed)
    rows: tuple[tuple[str, ...], ...] = tuple(
        (s.axis, levels.get(s.axis, ""), s.phase, COLLECTIVES.get(s.kind, s.kind), str(s.times), *_amounts(s)) for s in summed
    )  # fmt: skip
    columns: tuple[str, ...] = ("axis", "level", "phase", "collective", ">times", ">bytes", ">seconds")
    if hidden is not None:
        shares = [hidden.of(s.axis, s.phase, s.kind) for s in summed]
        rows = tuple((*row, "" if part is None else f"{part:.0%}") for row, part in zip(rows, shares, strict=True))
        columns = (*columns, ">hidden")
    return Table(title="Collectives by axis and level", columns=columns, rows=rows)


def _amounts(summed: Total) -> tuple[str, str]:
    return bytes_text(summed.nbytes), seconds_text(summed.seconds)


def _told(found: Exchanges, plan: Plan) -> list[str]:
    sent = found.matrix.sum()
    mean = f"A device sends {bytes_text(sent / plan.devices)} in a step on the average; all of them {bytes_text(sent)}."
    several = f" Rows and columns stand for {found.size} devices each." if found.size > 1 else ""
    how = "In the matrix a square's area is what its row sends to its column, carried in rings, an all-to-all evenly." + several
    return [mean, how]


def _level_bars(found: Exchanges) -> Picture:
    told = "Bytes of all devices by level of the cluster"
    if len(found.levels) < 2:
        return nothing(told)
    rows = [Bar(name=name, parts=((name, size, bytes_text(size)),), text=bytes_text(size)) for name, size in found.levels.items()]
    return bars(rows, told, alike=True)


def _level_table(found: Exchanges) -> Table:
    whole = sum(found.levels.values())
    rows = tuple((name, bytes_text(size), share(size, whole)) for name, size in found.levels.items())
    return Table(title="Bytes sent by level of the cluster, of all devices in a step", columns=("level", ">bytes", ">share"), rows=rows)


def matrix(found: Exchanges, devices: int) -> Picture:
    """Squares whose areas are proportional to the bytes from the row's devices to the column's."""
    count = len(found.matrix)
    told = "Who sends to whom: rows send, columns receive, a square's area is the bytes"
    if not found.matrix.any() or count < 2:
        return nothing(told)
    cell = min(LARGEST, ROOM / count)
    left, top, most = 90.0, 46.0, float(found.matrix.max())
    every = max(1, int(np.ceil(16 / cell)))
    out = [text(left, 14, "receivers: devices") + text(4, top - 6, "senders")]
    for block in range(0, count, every):
        at = block * cell + cell / 2
        out.append(text(left - 6, top + at + 4, found.name(block, devices), anchor="end"))
        if block % (every * (1 if found.size == 1 else 4)) == 0:
            out.append(text(left + at, top - 6, found.name(block, devices).partition("-")[0], anchor="middle"))
    for block in range(count + 1):
        out.append(line(left, top + block * cell, left + count * cell, top + block * cell, faint=True))
        out.append(line(left + block * cell, top, left + block * cell, top + count * cell, faint=True))
    for row, column in zip(*np.nonzero(found.matrix), strict=True):
        size = float(found.matrix[row, column])
        side = max(cell * float(np.sqrt(size / most)), 1.5)
        x, y = left + column * cell + (cell - side) / 2, top + row * cell + (cell - side) / 2
        title = f"{found.name(row, devices)} to {found.name(column, devices)}: {bytes_text(size)}"
        out.append(rectangle(x, y, side, side, "#0072b2", title))
    return picture(told, (WIDTH, top + count * cell + 8), out)


def pair_table(found: Exchanges, devices: int) -> Table:
    """The matrix if it is small, else its largest entries."""
    names = [found.name(block, devices) for block in range(len(found.matrix))]
    if len(names) <= MOST_CELLS:
        rows = tuple((name, *(bytes_text(size) if size else "-" for size in row)) for name, row in zip(names, found.matrix, strict=True))
        columns = ("from \\ to", *(f">{name}" for name in names))
        return Table(title="Bytes sent from device to device in a step", columns=columns, rows=rows if found.matrix.any() else ())
    order = np.argsort(-found.matrix, axis=None, kind="stable")[:MOST_PAIRS]
    places = [divmod(int(place), len(names)) for place in order]
    shown = tuple((names[i], names[j], bytes_text(found.matrix[i, j])) for i, j in places if found.matrix[i, j])
    return Table(title="The most that devices send to one another in a step", columns=("from", "to", ">bytes"), rows=shown)
