"""The join of tables that eliminates a variable.

    out[a, b, ...] = min over k of the sum of tables over k, a, b, ...

It is one bucket of U. Bertele and F. Brioschi's elimination (Nonserial Dynamic Programming, 1972).
"""

import functools
import itertools
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
    own). Sums without the last label come first: they are one number in a whole row of the output.

    >>> merging(((0,), (2, 0, 1), (1, 0), (0, 3)))
    ((1, -1), (3, -1), (2, 0), (0, 0))
    >>> merging(((0, 3), (0, 1)))
    ((1, -1), (0, -1))
    """
    axes = [frozenset(of) for of in labels]
    last = max(itertools.chain.from_iterable(labels), default=0)
    # A table of fewer axes may be part of any before it.
    by_size = sorted(range(len(labels)), key=lambda i: -len(labels[i]))
    hosts: list[int] = []
    guests = []
    for number in by_size:
        if any(axes[number] <= axes[host] for host in hosts):
            guests.append(number)
        else:
            hosts.append(number)
    # The sort is stable, so that the larger of two still comes first.
    hosts.sort(key=lambda host: last in axes[host])
    # A guest is added to a sum that is there, so that all hosts come before.
    return (
        *((number, -1) for number in hosts),
        *(
            (number, next(place for place, host in enumerate(hosts) if axes[number] <= axes[host]))
            for number in guests
        ),
    )
