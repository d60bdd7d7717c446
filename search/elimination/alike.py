"""Variables with equal surroundings as one: the graph of the classes of like variables.

Two variables are alike if their own tables are equal, and so are the tables of their edges and the
neighbours' own tables. Of L equal layers all but a few at the ends are alike, so the number of
classes does not grow with L. If like variables take like choices, the cost is

    sum_c n_c unary_c[x_c]  +  sum over pairs of classes and tables of  n table[x_c, x_d]

Classes are refined as colours are (B. Weisfeiler and A. Leman, 1968), all variables at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..costgraph import CostGraph
from ..tables import Indices, Table

Hashes = NDArray[np.uint64]

STREAMS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
"""Odd constants of the two ends of an edge (the golden ratio's, and one of xxHash's primes)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Link:
    """Equal edges between the variables of two classes, `count` times.

    `table`: the choices of class `first`, then of class `second`.
    """

    first: int
    second: int
    table: Table
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Classes:
    """The classes of like variables, and the links between them.

    `of`: array [variables], the class of each. `counts`: array [classes], the variables of each.
    `members`: array [classes], one variable of each.
    """

    of: Indices
    counts: Indices
    members: Indices
    links: tuple[Link, ...]


def classes(graph: CostGraph, digits: Sequence[int], *, merge: bool = True) -> Classes:
    """Return the classes of like variables; of single variables without `merge`.

    `digits`: a number for each variable; variables of different numbers are never alike.
    """
    count = len(graph.sizes)
    numbers = graph.numbers
    tables = np.array(numbers.edges, dtype=np.int64)
    ends = np.array(list(graph.edges), dtype=np.int64).reshape(-1, 2)
    of = np.arange(count)
    if merge:
        # All that may differ between two variables by themselves: choices, seconds and bytes.
        own = np.array(digits, dtype=np.int64)
        for mine in (numbers.unary, numbers.memory):
            if mine is not None:
                own = _joined(own, np.array(mine, dtype=np.int64))
        of = _refined(own, ends, tables)
    _, members, of = np.unique(of, return_index=True, return_inverse=True)
    # Classes are in the order of their first variables, as neighbours are close to each other.
    order = np.argsort(members)
    of = np.argsort(order)[of.reshape(-1)]
    members = members[order]
    return Classes(
        of=of,
        counts=np.bincount(of, minlength=len(members)),
        members=members,
        links=tuple(_links(graph, of[ends], tables)),
    )


def _joined(first: Indices, second: Indices) -> Indices:
    """Number the distinct pairs of two arrays' entries."""
    pairs = first * (int(second.max(initial=0)) + 1) + second
    return np.asarray(np.unique(pairs, return_inverse=True)[1]).reshape(-1)


def _refined(own: Indices, ends: Indices, tables: Indices) -> Indices:
    """Return classes of variables with equal numbers of their `own` and equal surroundings."""
    around = np.zeros(len(own), dtype=np.uint64)
    # A sum does not depend on the order of the edges. Should two sums be equal by chance, like
    # variables would only be more than they might be: their own tables are equal in any case.
    for side, stream in enumerate(STREAMS):
        near = _joined(tables, own[ends[:, 1 - side]])
        np.add.at(around, ends[:, side], _mixed(_mixed(near.astype(np.uint64)) ^ np.uint64(stream)))
    return _joined(own, np.unique(around, return_inverse=True)[1].reshape(-1))


def _mixed(values: Hashes) -> Hashes:
    """Scatter numbers over 64 bits (the finaliser of MurmurHash3)."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        values = (values ^ (values >> np.uint64(33))) * np.uint64(factor)
    return values ^ (values >> np.uint64(33))


def _links(graph: CostGraph, ends: Indices, tables: Indices) -> list[Link]:
    """Return the links of edges between the classes `ends`, equal ones once."""
    # Classes are numbered by their first variables, so an edge may lead back to an earlier class.
    turned = ends[:, 0] > ends[:, 1]
    pairs = np.where(turned[:, None], ends[:, ::-1], ends)
    key = _joined(_joined(pairs[:, 0], pairs[:, 1]), 2 * tables + turned)
    _, firsts, counts = np.unique(key, return_index=True, return_counts=True)
    arrays = graph.numbers.distinct
    return [
        Link(
            first=int(pairs[at, 0]),
            second=int(pairs[at, 1]),
            table=arrays[tables[at]].T if turned[at] else arrays[tables[at]],
            count=int(count),
        )
        for at, count in zip(firsts.tolist(), counts.tolist(), strict=True)
    ]
