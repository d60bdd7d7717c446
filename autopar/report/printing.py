"""Sentences and tables for terminals, pipes and files.

Columns are aligned, and wrapped if the width is known.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from autopar.printable import printable

WIDEST = 60
"""The most characters of a line in a cell."""
NARROWEST = 10
"""The least characters of a wrapped column."""
GAP = 2
_PIECES = re.compile(r"[^\s/,._-]*[/,._-]*\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under `columns`.

    A column with a name that starts with ">" is aligned on the right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def plain(table: Table, width: int | None = None) -> str:
    """The table as plain text, within `width` characters unless its words are longer.

    >>> rows = (("p5", "8"), ("dgx-h100", "128"))
    >>> print(plain(Table(title="clusters", columns=("name", ">devices"), rows=rows)))
    clusters
      name      devices
      p5              8
      dgx-h100      128
    """
    table = _spelled(table)
    right = [name.startswith(">") for name in table.columns]
    rows = [tuple(name.removeprefix(">") for name in table.columns), *table.rows]
    limits = _limits(rows, right, width)
    lines = [cells for row in rows for cells in _wrapped(row, limits)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    cells = [
        [
            cell.rjust(w) if r else cell.ljust(w)
            for cell, w, r in zip(line, widths, right, strict=True)
        ]
        for line in lines
    ]
    title = (
        table.title if width is None else textwrap.fill(table.title, width, break_long_words=False)
    )
    return "\n".join([title, *("  " + "  ".join(line).rstrip() for line in cells)])


def _spelled(table: Table) -> Table:
    """The table with control characters in names from files spelled out."""
    rows = tuple(tuple(printable(cell, lines=False) for cell in row) for row in table.rows)
    columns = tuple(printable(name, lines=False) for name in table.columns)
    return Table(title=printable(table.title, lines=False), columns=columns, rows=rows)


def _limits(rows: Sequence[tuple[str, ...]], right: Sequence[bool], width: int | None) -> list[int]:
    """The widths of the columns.

    The widest column of text loses one character at a time, until the row fits.
    """
    natural = [max(len(row[i]) for row in rows) for i in range(len(right))]
    limits = [min(size, WIDEST) for size in natural]
    if width is None:
        return limits
    left = sum(limits) + GAP * len(limits) - width
    while left > 0:
        # Columns of numbers keep their width: a figure on two lines would be read wrongly.
        widest = max(
            (i for i in range(len(limits)) if not right[i]), key=lambda i: limits[i], default=None
        )
        if widest is None or limits[widest] <= NARROWEST:
            break
        limits[widest] -= 1
        left -= 1
    return limits


def _wrapped(row: tuple[str, ...], limits: Sequence[int]) -> Iterable[tuple[str, ...]]:
    """The lines of a wrapped row; numbers are on the first line."""
    cells = [wrap_cell(cell, limit) for cell, limit in zip(row, limits, strict=True)]
    return itertools.zip_longest(*cells, fillvalue="") if any(cells) else [row]


def wrap_cell(cell: str, limit: int) -> list[str]:
    """A cell in lines of at most `limit` characters; a word that is longer stays whole.

    Lines end after spaces, or else after the separators in names.

    >>> wrap_cell("h.{0..11}/mlp/c_fc over gpu", 12), wrap_cell("unbreakable", 4)
    (['h.{0..11}/', 'mlp/c_fc', 'over gpu'], ['unbreakable'])
    """
    lines: list[str] = []
    for word in cell.split():
        if lines and len(lines[-1]) + 1 + len(word) <= limit:
            lines[-1] += " " + word
            continue
        lines.append("")
        for piece in [word] if len(word) <= limit else filter(None, _PIECES.findall(word)):
            if lines[-1] and len(lines[-1]) + len(piece) > limit:
                lines.append("")
            lines[-1] += piece
    return lines


def sentence(text: str, width: int | None) -> str:
    """A text with lines wrapped between words; continued lines are indented."""
    if width is None:
        return text
    return "\n".join(_line(line, width) for line in text.split("\n"))


def _line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def width_of(out: TextIO) -> int | None:
    """The characters of a line from COLUMNS or the terminal; None if neither exists."""
    # Pipes and files get whole lines, which other programs can search and split.
    if os.environ.get("COLUMNS", "").isdecimal() and int(os.environ["COLUMNS"]) > 0:
        return int(os.environ["COLUMNS"])
    return shutil.get_terminal_size().columns if out.isatty() else None


def show(parts: Iterable[str | Table], stream: TextIO | None = None) -> None:
    """Print sentences and tables, with an empty line before each table."""
    out = stream or sys.stdout
    width = width_of(out)
    for part in parts:
        if isinstance(part, str):
            print(sentence(printable(part), width), file=out)
        else:
            text = plain(part, width)
            print(
                "\n" + (_bold(text) if out.isatty() and "NO_COLOR" not in os.environ else text),
                file=out,
            )


def _bold(text: str) -> str:
    """The title of a table in bold."""
    title, _, rest = text.partition("\n")
    return f"\x1b[1m{title}\x1b[0m\n{rest}"
