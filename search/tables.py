"""Tables of costs by their values: equal tables have equal numbers and share their results.

Equal layers of a model have equal tables. Whatever is worked out for one of them (a join, a cut, a
transposed copy) serves all, so it is remembered under the number of the table.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Indices = NDArray[np.int64]

SMALL = 64
"""Entries of an array up to which all of them make its key."""
SAMPLES = 32
"""Rows and columns of a larger array in its digest."""


class Interner:
    """Numbers arrays from 0 on, in the order in which they come, equal arrays alike."""

    def __init__(self) -> None:
        self.arrays: list[NDArray[np.number[Any]]] = []
        self._small: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._by_identity: dict[int, tuple[NDArray[np.number[Any]], int]] = {}
        self._by_digest: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def number(self, array: NDArray[np.number[Any]]) -> int:
        """Return the number of the array."""
        # Mostly the very same array comes again, which shows without a look at its entries.
        known = self._by_identity.get(id(array))
        if known is not None:
            return known[1]
        number = self._compared(array) if array.size > SMALL else self._of_small(array)
        # The array is held beside its number, so that no later one can take over its identity.
        self._by_identity[id(array)] = (array, number)
        return number

    def _of_small(self, array: NDArray[np.number[Any]]) -> int:
        number = self._small.setdefault((array.shape, array.tobytes()), len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(array)
        return number

    def _compared(self, array: NDArray[np.number[Any]]) -> int:
        """Return the number of an array not seen before, by a digest and then by its entries."""
        alike = self._by_digest.setdefault((array.shape, zlib.crc32(_sample(array).data)), [])
        # A digest of samples is only a filter: arrays may differ in rows that were not sampled.
        for number in alike:
            if np.array_equal(self.arrays[number], array):
                return number
        alike.append(len(self.arrays))
        self.arrays.append(array)
        return alike[-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Numbers:
    """The distinct tables of a graph, and the number of each variable's and each edge's table.

    Edges are in the graph's order. What depends on numbers alone serves all graphs with equal ones.
    """

    distinct: Sequence[Table]
    unary: tuple[int, ...]
    memory: tuple[int, ...] | None
    edges: tuple[int, ...]


def numbered(
    unary: Iterable[Table], memory: Iterable[Table] | None, edges: Iterable[Table]
) -> Numbers:
    """Number the tables of a graph."""
    interner = Interner()
    number = interner.number
    # The order is that of `Numbers`, so that memories do not change the order of the edges' tables.
    of_unary = tuple([number(table) for table in unary])
    of_memory = None if memory is None else tuple([number(table) for table in memory])
    of_edges = tuple([number(table) for table in edges])
    distinct = cast(list[Table], interner.arrays)
    return Numbers(distinct=distinct, unary=of_unary, memory=of_memory, edges=of_edges)


def _sample(array: NDArray[np.number[Any]]) -> NDArray[np.generic]:
    """A few rows and columns, which differ for most arrays."""
    return np.ascontiguousarray(
        array[tuple(slice(None, None, max(1, size // SAMPLES)) for size in array.shape)]
    )


def shared_map(function: Callable[[Table], Table]) -> Callable[[Table], Table]:
    """Return `function` with a memory: it is applied once to equal tables, which stay shared."""
    interner = Interner()
    results: list[Table] = []

    def apply(table: Table) -> Table:
        number = interner.number(table)
        if number == len(results):
            results.append(function(table))
        return results[number]

    return apply
