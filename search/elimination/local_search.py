"""Coordinate descent: each variable in turn takes its best choice given the others.

    x_v <- argmin over c of  unary[v][c] + sum over neighbours u of edge[c, x_u]

The choice stays within the memory that is left. Descent ends when a sweep changes nothing. Source:
J. Besag, On the Statistical Analysis of Dirty Pictures, 1986 (iterated conditional modes).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np

from ..costgraph import CostGraph
from ..tables import Table
from .descent import descend as descend_on

SWEEPS = 4
"""The most sweeps of a descent."""


class Descent:
    """Descends on one graph; its tables are laid out once."""

    def __init__(self, graph: CostGraph) -> None:
        self.graph = graph
        self.tables: list[Table] = []
        self.program = self._program()

    def _program(self) -> array[int]:
        """The variables with their neighbours, as the descent reads them."""
        graph = self.graph
        numbers: dict[int, int] = {}

        def number(table: Table) -> int:
            """The number of a table; equal layers share theirs."""
            if id(table) not in numbers:
                numbers[id(table)] = len(self.tables)
                self.tables.append(table)
            return numbers[id(table)]

        around: list[list[int]] = [[] for _ in graph.sizes]
        for (u, v), table in graph.edges.items():
            # Each end reads the table along its own axis, so that none is turned.
            both = number(table)
            around[u] += (v, both, 0)
            around[v] += (u, both, 1)
        program = array("q")
        for v, neighbours in enumerate(around):
            # One without a choice never moves; only its neighbours read it.
            if graph.sizes[v] > 1:
                weight = number(graph.memory[v]) if graph.memory is not None else -1
                program.extend((v, number(graph.unary[v]), weight, len(neighbours) // 3))
                program.extend(neighbours)
        return program

    def run(
        self, start: Sequence[int], *, price: float = 0.0, limit: float | None = None
    ) -> list[int]:
        """The assignment at the end of a descent from `start`, of at most `SWEEPS` sweeps.

        A byte costs `price`. With a `limit` no step takes more memory beyond it.
        """
        choices = np.array(start, dtype=np.int64)
        # A start over the limit leaves less than no room, so that moves can only give bytes back.
        room = math.inf if limit is None else limit - self.graph.memory_of(start)
        descend_on(self.tables, self.program, choices, price, room, SWEEPS)
        moved: list[int] = choices.tolist()
        return moved


def descend(graph: CostGraph, start: Sequence[int], *, limit: float | None = None) -> list[int]:
    """The assignment at the end of one descent on a graph (see `Descent.run`)."""
    return Descent(graph).run(start, limit=limit)
