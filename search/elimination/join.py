"""The join of tables that eliminates a variable.

    out[a, b, ...] = min over k of the sum of tables over k, a, b, ...

It is one bucket of U. Bertele and F. Brioschi's elimination (Nonserial Dynamic Programming, 1972).
"""

import functools
from collections.abc import Sequence

import numpy as np

from autopar.compiled import minimise

from ..tables import Table

Labels = tuple[int, ...]


def eliminate(inputs: Sequence[tuple[Labels, Table]], shape: tuple[int, ...]) -> Table:
    """Sum the tables and minimise over label 0.

    The result's axes are the labels 1, 2, ... of sizes `shape`.

    >>> tables = [((0, 1), np.array([[1.0, 5.0], [2.0, 3.0]])), ((0,), np.array([1.0, 0.0]))]
    >>> eliminate(tables, (2,))
    array([2., 3.])
    """
    terms = merge(inputs, len(shape) + 1)
    out = np.empty(shape)
    minimise(out, tuple(terms))
    return out


def merge(inputs: Sequence[tuple[Labels, Table]], rank: int) -> list[Table]:
    """Sum tables whose labels are a subset of another's; one table for each maximal set of labels.

    Axes are in the order 0, 1, ..., missing ones of size 1. Each sum lies in one piece, as its
    planes are read one by one.
    """
    merged: list[Table] = []
    for number, order, axes, host in _laid(tuple([labels for labels, _ in inputs])):
        laid = _expand(inputs[number][1].transpose(order), axes, rank)
        if host < 0:
            merged.append(np.ascontiguousarray(laid))
        else:
            merged[host] = np.add(merged[host], laid, order="C")
    return merged


# An elimination at another price, and every equal layer of another graph, lays the same labels.
@functools.lru_cache(maxsize=4096)
def _laid(labels: tuple[Labels, ...]) -> tuple[tuple[int, Labels, Labels, int], ...]:
    """Return how each table is laid into the sums, in the order of merging.

    For each table: its number, the order of its axes, their labels, and the sum to which it is
    added (-1: to none, it begins a sum of its own).
    """
    hosts: list[Labels] = []
    layouts = []
    # Tables of most axes come first, so that a table finds its host, if there is one, already
    # there.
    for number in sorted(range(len(labels)), key=lambda i: -len(labels[i])):
        mine = labels[number]
        order = tuple(sorted(range(len(mine)), key=mine.__getitem__))
        axes = tuple(mine[i] for i in order)
        host = next((place for place, key in enumerate(hosts) if set(axes) <= set(key)), -1)
        if host < 0:
            hosts.append(axes)
        layouts.append((number, order, axes, host))
    return tuple(layouts)


def _expand(table: Table, axes: Labels, rank: int) -> Table:
    sizes = [1] * rank
    for axis, size in zip(axes, table.shape, strict=True):
        sizes[axis] = size
    return table.reshape(sizes)
