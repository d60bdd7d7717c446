"""A part of the report: a heading with sentences, pictures and tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.report.tables import Table

from .shapes import Picture

ROOM = 250_000
"""The most characters of a table, roughly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with sentences, pictures and tables.

    `first`: a table before the sentences, which are then folded.
    """

    anchor: str
    title: str
    first: Table | None = None
    told: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()


def shortened(table: Table) -> Table:
    """The rows that fit into `ROOM`, and a row with the number of omitted ones."""
    rows: list[tuple[str, ...]] = []
    left = ROOM
    for row in table.rows:
        left -= sum(map(len, row)) + 10 * len(row)
        if left < 0:
            rows.append((f"and {len(table.rows) - len(rows)} more rows", *([""] * (len(row) - 1))))
            break
        rows.append(row)
    return replace(table, rows=tuple(rows))


def share(part: float, whole: float) -> str:
    """A part in per cent."""
    return f"{part / whole:.1%}" if whole > 0 else ""
