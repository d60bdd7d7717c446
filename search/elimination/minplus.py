"""The min-plus kernel, in place and in blocks.

    out[a, b, ...] = min over k of the sum of tables over k, a, b, ...

It is a product of tensors in the semiring of minimum and sum: one bucket of U. Bertele and F.
Brioschi's elimination (Nonserial Dynamic Programming, 1972).
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from ..tables import Table

Labels = tuple[int, ...]
BLOCK = 1 << 15
"""Entries of the plane that is updated in place: two such float64 planes stay in a second-level
cache of 1 MiB.
"""
SMALL = 1 << 16
"""The most entries of a sum that is made at once: one numpy call a table, instead of one a table
and choice.
"""


def eliminate(inputs: Sequence[tuple[Labels, Table]], shape: tuple[int, ...]) -> Table:
    """Sum the tables and minimise over label 0.

    The result's axes are the labels 1, 2, ... of sizes `shape`.

    >>> tables = [((0, 1), np.array([[1.0, 5.0], [2.0, 3.0]])), ((0,), np.array([1.0, 0.0]))]
    >>> eliminate(tables, (2,))
    array([2., 3.])
    """
    terms = merge(inputs, len(shape) + 1)
    size = terms[0].shape[0]
    if len(terms) == 1:
        return np.asarray(terms[0].min(axis=0))
    if size * math.prod(shape) <= SMALL:
        return np.asarray(functools.reduce(np.add, terms).min(axis=0))
    # A large sum never exists whole: for each block of rows, one plane a choice of label 0 is added
    # up and minimised.
    out = np.empty(shape)
    rows = max(1, BLOCK * shape[0] // math.prod(shape))
    plane = np.empty((min(rows, shape[0]), *shape[1:]))
    for start in range(0, shape[0], rows):
        block = [term if term.shape[1] == 1 else term[:, start : start + rows] for term in terms]
        target = out[start : start + rows]
        _sum(block, 0, target)
        scratch = plane[: len(target)]
        for k in range(1, size):
            _sum(block, k, scratch)
            np.minimum(target, scratch, out=target)
    return out


def _sum(block: Sequence[Table], k: int, out: Table) -> None:
    np.add(block[0][k], block[1][k], out=out)
    for term in block[2:]:
        np.add(out, term[k], out=out)


def merge(inputs: Sequence[tuple[Labels, Table]], rank: int) -> list[Table]:
    """Sum tables whose labels are a subset of another's; one table for each maximal set of labels.

    Axes are in the order 0, 1, ..., missing ones of size 1.
    """
    merged: list[Table] = []
    for number, order, axes, host in _laid(tuple([labels for labels, _ in inputs])):
        laid = _expand(inputs[number][1].transpose(order), axes, rank)
        if host < 0:
            # Planes of label 0 are read one by one, which is quick only if each lies in one piece.
            merged.append(np.ascontiguousarray(laid))
        else:
            merged[host] = merged[host] + laid
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
