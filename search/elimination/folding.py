"""The folding of variables of one choice into their neighbours, by the numbers of tables alone.

Which tables are added up, and which sums are equal, is the same for all graphs that have equal
tables in the same places.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..costgraph import Edge

FOLDED = 64
"""Foldings that are remembered: those of the last meshes, each with and without memory."""

Slice = tuple[int, int, int]
"""An edge's table, with the sets of its rows and columns that survive."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Folding:
    """How variables of one choice are folded, by the numbers of tables and of surviving choices.

    `rows`: the distinct sums, each of a table and what is added to it, with the choices that are
    left. `row_of`: by variable. `slices`: the distinct tables of edges. `edges`: the edges that are
    left, each with the number of its slice. `sizes`: the choices that are.
    """

    sizes: tuple[int, ...]
    rows: tuple[tuple[int, int, tuple[Slice, ...]], ...]
    row_of: tuple[int, ...]
    slices: tuple[Slice, ...]
    edges: tuple[tuple[Edge, int], ...]
    memory_rows: tuple[tuple[int, int], ...]
    memory_row_of: tuple[int, ...] | None


# Graphs of a mesh mostly have equal tables in the same places, whatever these hold.
@functools.lru_cache(maxsize=FOLDED)
def folding(
    unary: tuple[int, ...],
    memory: tuple[int, ...] | None,
    edges: tuple[tuple[Edge, int], ...],
    surviving: tuple[int, ...],
    size_of: tuple[int, ...],
) -> Folding:
    """Fold variables of one choice.

    All are numbers of tables, by variable or edge; `surviving`: numbers of sets of choices;
    `size_of`: their sizes.
    """
    sizes = tuple([size_of[number] for number in surviving])
    left: list[tuple[Edge, int]] = []
    slices: dict[Slice, int] = {}
    extra: list[list[Slice]] = [[] for _ in sizes]
    for (u, v), table in edges:
        key = (table, surviving[u], surviving[v])
        if sizes[u] > 1 and sizes[v] > 1:
            left.append(((u, v), slices.setdefault(key, len(slices))))
        else:
            extra[u if sizes[v] == 1 else v].append(key)
    rows: dict[tuple[int, int, tuple[Slice, ...]], int] = {}
    row_of = [
        rows.setdefault((table, own, tuple(sorted(added))), len(rows))
        for table, own, added in zip(unary, surviving, extra, strict=True)
    ]
    memory_rows: dict[tuple[int, int], int] = {}
    memory_row_of = [
        memory_rows.setdefault(key, len(memory_rows))
        for key in zip(memory or (), surviving if memory else (), strict=True)
    ]
    return Folding(
        sizes=sizes,
        rows=tuple(rows),
        row_of=tuple(row_of),
        slices=tuple(slices),
        edges=tuple(left),
        memory_rows=tuple(memory_rows),
        memory_row_of=None if memory is None else tuple(memory_row_of),
    )
