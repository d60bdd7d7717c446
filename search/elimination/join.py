"""The join of tables that eliminates a variable.

    out[a, b, ...] = min over k of the sum of tables over k, a, b, ...

It is one bucket of U. Bertele and F. Brioschi's elimination (Nonserial Dynamic Programming, 1972).
"""

import functools
from collections.abc import Sequence

from autopar.compiled.elimination import Labels, Merging, merged

from ..tables import Table


def merge(inputs: Sequence[tuple[Labels, Table]], rank: int) -> list[Table]:
    """Sum tables whose labels are a subset of another's; one table for each maximal set of labels.

    Axes are in the order 0, 1, ..., missing ones of size 1.
    """
    return merged(inputs, merging(tuple([labels for labels, _ in inputs])), rank)


# Every equal layer of another graph merges the same labels.
@functools.lru_cache(maxsize=4096)
def merging(labels: tuple[Labels, ...]) -> Merging:
    """Return the order in which tables are merged into sums.

    For each table its number, and the sum to which it is added (-1: to none, it begins a sum of its
    own).

    >>> merging(((0,), (2, 0, 1), (1, 0), (0, 3)))
    ((1, -1), (2, 0), (3, -1), (0, 0))
    """
    hosts: list[frozenset[int]] = []
    order = []
    # Tables of most axes come first, so that a table finds its host, if there is one, already
    # there.
    for number in sorted(range(len(labels)), key=lambda i: -len(labels[i])):
        axes = frozenset(labels[number])
        host = next((place for place, key in enumerate(hosts) if axes <= key), -1)
        if host < 0:
            hosts.append(axes)
        order.append((number, host))
    return tuple(order)
