"""The elimination of variables in numpy: the reference of the compiled one.

A program is an array of integers, with one record for each join:

    length of the record, size of label 0, rank, sizes of labels 1, 2, ...; number of inputs
    for each input: its table, its rank, the label of each of its axes
    for each input in the order of merging: its number, and the term to which it is added (-1: it
    begins a term of its own)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .in_numpy import Table, minimise

Labels = tuple[int, ...]
Inputs = Sequence[tuple[Labels, int]]
Merging = Sequence[tuple[int, int]]


def recorded(size: int, shape: Sequence[int], inputs: Inputs, merging: Merging) -> list[int]:
    """Return the record of a join over labels 0 (of `size` choices), 1, 2, ... (of `shape`).

    `inputs`: the labels of the axes, and the number of the table. `merging`: as in a record.
    """
    record = [size, len(shape), *shape, len(inputs)]
    for labels, table in inputs:
        record += (table, len(labels), *labels)
    for number, host in merging:
        record += (number, host)
    return [len(record) + 1, *record]


def eliminate(tables: list[Table], program: array[int], leaves: int, wanted: bytes, /) -> None:
    """Write the tables of the wanted joins, which lie behind those of the leaves."""
    records = _records(program)
    for number, (_, shape, inputs, merging) in enumerate(records):
        if wanted[number]:
            taken = [(labels, tables[table]) for labels, table in inputs]
            minimise(tables[leaves + number], tuple(merged(taken, merging, 1 + len(shape))))


def assign(
    tables: list[Table],
    program: array[int],
    leaves: int,
    steps: array[int],
    choices: NDArray[np.int64],
    /,
) -> None:
    """Write the choices that attain the optimum.

    `steps`: for each variable its number, that of its join, and its neighbours; those are chosen
    before it.
    """
    records = list(_records(program))
    # Equal cases are computed once.
    known: dict[tuple[int, ...], int] = {}
    at = 0
    while at < len(steps):
        join = steps[at + 1]
        size, shape, inputs, _ = records[join]
        chosen = choices[steps[at + 2 : at + 2 + len(shape)]].tolist()
        case = (join, *chosen)
        if case not in known:
            total = np.zeros(size)
            for labels, table in inputs:
                rows = tuple(slice(None) if label == 0 else chosen[label - 1] for label in labels)
                total = total + tables[table][rows]
            known[case] = int(total.argmin())
        choices[steps[at]] = known[case]
        at += 2 + len(shape)


def merged(inputs: Sequence[tuple[Labels, Table]], merging: Merging, rank: int) -> list[Table]:
    """Return the sums of tables that are merged, with axes in the order 0, 1, ...

    Missing axes are of size 1. Each sum lies in one piece, as its planes are read one by one.
    """
    sums: list[Table] = []
    for number, host in merging:
        labels, table = inputs[number]
        order = sorted(range(len(labels)), key=labels.__getitem__)
        sizes = [1] * rank
        for axis in order:
            sizes[labels[axis]] = table.shape[axis]
        laid = table.transpose(order).reshape(sizes)
        if host < 0:
            sums.append(np.ascontiguousarray(laid))
        else:
            sums[host] = np.add(sums[host], laid, order="C")
    return sums


def _records(
    program: array[int],
) -> Iterator[tuple[int, list[int], list[tuple[Labels, int]], list[tuple[int, int]]]]:
    """The size, shape, inputs and merging of each join."""
    start = 0
    while start < len(program):
        end = start + program[start]
        at = start + 3 + program[start + 2]
        shape = program[start + 3 : at].tolist()
        count = program[at]
        at += 1
        inputs = []
        for _ in range(count):
            behind = at + 2 + program[at + 1]
            inputs.append((tuple(program[at + 2 : behind]), program[at]))
            at = behind
        pairs = program[at:end].tolist()
        yield program[start + 1], shape, inputs, list(zip(pairs[::2], pairs[1::2], strict=True))
        start = end
