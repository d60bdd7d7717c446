"""Folds rows of a plan file into one row if their names differ only in the numbers of layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from .equal_layers import number_text

_NUMBER = re.compile(r"(?<![^./_])\d+(?![^./_])")
HOLE = "\0"
Row = tuple[str, ...]


def folded(rows: Iterable[Row]) -> list[tuple[int, Row]]:
    """The folded rows, each with the number of rows that it represents; a row begins with a name.

    Folded rows are equal except for the numbers in the names, and these numbers make all
    combinations.

    >>> folded([("h.0/up", "n"), ("h.1/up", "n"), ("h.0/down", "k"), ("h.1/down", "n")])
    [(2, ('h.{0,1}/up', 'n')), (1, ('h.0/down', 'k')), (1, ('h.1/down', 'n'))]
    """
    return [(len(names), row) for names, row in folded_names(rows)]


def folded_names(rows: Iterable[Row]) -> list[tuple[list[str], Row]]:
    """The folded rows (see `folded`), each with the names that it represents.

    >>> folded_names([("h.0/up", "n"), ("h.1/up", "n")])
    [(['h.0/up', 'h.1/up'], ('h.{0,1}/up', 'n'))]
    """
    numbered: dict[Row, list[tuple[int, ...]]] = {}
    names: dict[tuple[Row, tuple[int, ...]], list[str]] = {}
    for name, *rest in rows:
        key = (_NUMBER.sub(HOLE, name), *rest)
        numbers = tuple(map(int, _NUMBER.findall(name)))
        numbered.setdefault(key, []).append(numbers)
        names.setdefault((key, numbers), []).append(name)
    folds = [(key, fold) for key, numbers in numbered.items() for fold in _of(key, numbers)]
    return [([names[key, n].pop(0) for n in members], row) for key, (members, row) in folds]


def _of(key: Row, numbers: list[tuple[int, ...]]) -> list[tuple[list[tuple[int, ...]], Row]]:
    """One row if the numbers make all combinations, else one a number at the first difference."""
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if math.prod(map(len, columns)) == len(numbers):
        fixed = key[0].split(HOLE)
        return [
            (
                numbers,
                (
                    "".join(
                        a + b for a, b in zip(fixed, [*map(number_text, columns), ""], strict=True)
                    ),
                    *key[1:],
                ),
            )
        ]
    place = next(i for i, column in enumerate(columns) if len(column) > 1)
    parts: dict[int, list[tuple[int, ...]]] = {}
    for place_numbers in numbers:
        parts.setdefault(place_numbers[place], []).append(place_numbers)
    if any(len(part) == len(numbers) for part in parts.values()) or len(set(numbers)) < len(
        numbers
    ):
        return [row for n in numbers for row in _of(key, [n])]
    return [row for part in parts.values() for row in _of(key, part)]
