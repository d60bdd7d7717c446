"""The reduction before any search: equal tables shared, useless choices dropped, variables folded.

Dead-end elimination (Desmet et al. 1992; the criterion of Goldstein 1994): choice c of v goes when
another choice d is never worse,

    unary[c] - unary[d]
      + sum over neighbours u of  min over x_u of (edge[c, x_u] - edge[d, x_u])   >=  0
    memory[d] <= memory[c]

because d can then replace c in any assignment. The sum is too expensive for all pairs. An upper
bound of it, from two x_u (where c is best, where d is worst), leaves few rivals d, and each c tries
the most promising of them. Variables with equal surroundings are judged once, and in one pass: a
second pass drops next to nothing. Variables of one choice are folded into their neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..costgraph import CostGraph, NoAssignment
from ..tables import Indices, Interner, Numbers, Table, numbered
from .folding import Slice, folding

RIVALS = 2
"""Rivals tried for each choice; on tables of redistributions, further ones cost more time than they
save.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """A smaller graph with the same optimum.

    `surviving[v]`: the original choices of the reduced variable. `substitutes[v]`: for each
    original choice itself, its replacement, or -1 if it is forbidden; None if all survive.
    """

    graph: CostGraph
    surviving: tuple[Indices, ...]
    substitutes: tuple[Indices | None, ...]

    def restore(self, choices: Sequence[int]) -> list[int]:
        """The original graph's choice indices."""
        return [
            int(indices[choice]) for indices, choice in zip(self.surviving, choices, strict=True)
        ]


def reduce(graph: CostGraph, *, prune: bool = True, memory: bool = True) -> Reduction:
    """Share equal tables of `graph`, prune choices (with `prune`) and fold settled variables.

    Without `memory` the result has no memory tables. Raises `NoAssignment` if a variable has no
    choice left.
    """
    return _Reducer(graph, memory=memory).run(prune)


class _Reducer:
    """The surviving choices (as interned index arrays) while they shrink."""

    def __init__(self, graph: CostGraph, *, memory: bool) -> None:
        numbers = graph.numbers
        self.tables = numbers.distinct
        self.index_sets = Interner()
        self.unary = numbers.unary
        self.memory = numbers.memory if memory else None
        self.edges = tuple(zip(graph.edges, numbers.edges, strict=True))
        full = {size: np.arange(size) for size in set(graph.sizes)}
        self.surviving = [self.index_sets.number(full[size]) for size in graph.sizes]
        self.slices: dict[Slice, Table] = {}
        self.substitutes: list[Indices | None] = [None] * len(graph.sizes)

    def run(self, prune: bool) -> Reduction:
        if prune:
            self._prune()
        return self._fold()

    def _prune(self) -> None:
        incident: list[list[tuple[int, int, int]]] = [[] for _ in self.surviving]
        for (u, v), table in self.edges:
            incident[u].append((table, 0, v))
            incident[v].append((table, 1, u))
        judged: dict[object, tuple[int, Indices | None]] = {}
        for v in range(len(self.surviving)):
            # Equal signatures, as of equal layers, have equal results.
            around = tuple(
                sorted((table, side, self.surviving[u]) for table, side, u in incident[v])
            )
            signature = (
                self.unary[v],
                self.memory[v] if self.memory else -1,
                self.surviving[v],
                around,
            )
            if signature not in judged:
                judged[signature] = self._judge(v, around)
            self.surviving[v], self.substitutes[v] = judged[signature]

    def _indices(self, v: int) -> Indices:
        return np.asarray(self.index_sets.arrays[self.surviving[v]], dtype=np.int64)

    def _judge(self, v: int, around: Sequence[tuple[int, int, int]]) -> tuple[int, Indices | None]:
        mine = self.surviving[v]
        rows = [
            self._slice(table, mine, other) if side == 0 else self._slice(table, other, mine).T
            for table, side, other in around
        ]
        indices = self._indices(v)
        unary = self._row(self.unary[v], mine)
        memory = self._row(self.memory[v], mine) if self.memory else np.zeros(len(indices))
        instead = substitutes(unary, memory, rows)
        alive = np.flatnonzero(instead == np.arange(len(indices)))
        return (
            (mine, None)
            if len(alive) == len(indices)
            else (self.index_sets.number(indices[alive]), instead)
        )

    def _row(self, table: int, surviving: int) -> Table:
        array = self.tables[table]
        indices = self.index_sets.arrays[surviving]
        whole = len(array) == len(indices)
        return np.asarray(array if whole else array[indices], dtype=np.float64)

    def _slice(self, table: int, set_u: int, set_v: int) -> Table:
        key = (table, set_u, set_v)
        if key not in self.slices:
            array = self.tables[table]
            rows = self.index_sets.arrays[set_u]
            columns = self.index_sets.arrays[set_v]
            whole = array.shape == (len(rows), len(columns))
            self.slices[key] = np.asarray(
                array if whole else array[np.ix_(rows, columns)], dtype=np.float64
            )
        return self.slices[key]

    def _fold(self) -> Reduction:
        """Return the reduced graph; an edge with a settled end joins the other end's costs."""
        folded = folding(
            self.unary,
            self.memory,
            self.edges,
            tuple(self.surviving),
            tuple([len(indices) for indices in self.index_sets.arrays]),
        )
        # Equal sums become one array, so that the search recognises equal layers.
        rows = [
            sum([self._slice(*key).reshape(-1) for key in extra], self._row(table, surviving))
            for table, surviving, extra in folded.rows
        ]
        memory_rows = [self._row(*key) for key in folded.memory_rows]
        slices = [self._slice(*key) for key in folded.slices]
        memory_of = folded.memory_row_of
        small = CostGraph(
            derived=True,
            sizes=folded.sizes,
            unary=tuple([rows[row] for row in folded.row_of]),
            edges={edge: slices[number] for edge, number in folded.edges},
            memory=None if memory_of is None else tuple([memory_rows[row] for row in memory_of]),
        )
        # Sums may be equal that were made of other tables, so that all of them are compared.
        numbers = numbered(rows, memory_rows, slices)
        assert numbers.memory is not None
        small.is_numbered(
            Numbers(
                distinct=numbers.distinct,
                unary=tuple([numbers.unary[row] for row in folded.row_of]),
                memory=None
                if memory_of is None
                else tuple([numbers.memory[row] for row in memory_of]),
                edges=tuple([numbers.edges[number] for _, number in folded.edges]),
            )
        )
        sets = [np.asarray(indices, dtype=np.int64) for indices in self.index_sets.arrays]
        return Reduction(
            graph=small,
            surviving=tuple([sets[number] for number in self.surviving]),
            substitutes=tuple(self.substitutes),
        )


def substitutes(unary: Table, memory: Table, rows: Sequence[Table]) -> Indices:
    """Return for each choice itself, its replacement, or -1 if it is forbidden.

    `rows`: the edges' tables, with these choices on the first axis.
    """
    possible = np.isfinite(unary)
    for table in rows:
        possible &= np.isfinite(table.min(axis=1))
    alive = np.flatnonzero(possible)
    if not len(alive):
        raise NoAssignment
    unary = unary[alive]
    memory = memory[alive]
    rows = [table[alive] for table in rows]
    rivals, advantage = _rivals(unary, memory, rows)
    for table in rows:
        advantage += _least_differences(table, rivals)
    lost, winner = np.nonzero(advantage >= 0.0)
    instead = np.full(len(possible), -1)
    instead[alive] = alive
    # Of two choices that may replace each other only one goes, and a replacement itself always
    # stays.
    for c, d in zip(alive[lost[::-1]], alive[rivals[lost, winner][::-1]], strict=True):
        if instead[d] == d and instead[c] == c:
            instead[c] = d
    return instead


def _rivals(unary: Table, memory: Table, rows: Sequence[Table]) -> tuple[Indices, Table]:
    """Return the most promising rivals of each choice, and what each saves in the unary table.

    A saving of minus infinity means that there is no rival.
    """
    size = len(unary)
    every = np.arange(len(unary))
    saving = unary[:, None] - unary
    promise = saving.copy()
    for table in rows:
        best = table.argmin(axis=1)
        worst = table.argmax(axis=1)
        # A choice that is alive has a finite entry, so its least one is.
        at_best = table[every, best][:, None] - table[:, best].T
        at_worst = _difference(table[:, worst], table[every, worst])
        promise += np.minimum(at_best, at_worst)
    # A replacement of more bytes could exceed the limit.
    promise[memory[:, None] < memory] = -np.inf
    np.fill_diagonal(promise, -np.inf)
    rivals = np.empty((size, min(RIVALS, size)), dtype=np.int64)
    advantage = np.empty(rivals.shape)
    # The bound is from above: a rival that is not promising surely fails, and a promising one is
    # compared in full by the caller.
    for k in range(rivals.shape[1]):
        best = promise.argmax(axis=1)
        rivals[:, k] = best
        advantage[:, k] = np.where(promise[every, best] >= 0.0, saving[every, best], -np.inf)
        promise[every, best] = -np.inf
    return rivals, advantage


def _least_differences(table: Table, rivals: Indices) -> Table:
    least = np.full(rivals.shape, np.inf)
    for k in range(rivals.shape[1]):
        least[:, k] = _difference(table, table[rivals[:, k]]).min(axis=1)
    return least


def _difference(ours: Table, theirs: Table) -> Table:
    """`ours - theirs`, infinite where `ours` is forbidden."""
    # The plain difference would be NaN where both are forbidden.
    if ours.max() < np.inf:
        return np.asarray(ours - theirs)
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(ours), np.inf, ours - theirs)
