"""Coordinate descent in numpy.

A program is an array of integers, with one record for each variable that has a choice:

    its number, its own table, its table of bytes (-1: none); number of neighbours
    for each neighbour: its number, the table of the pair, and the variable's axis there
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from autopar.compiled.in_numpy import Table


def descend(
    tables: list[Table],
    program: array[int],
    choices: NDArray[np.int64],
    price: float,
    room: float,
    sweeps: int,
    /,
) -> None:
    """Let each variable in turn take its best choice given the others, until a sweep moves none.

    A byte costs `price`. `room`: bytes that moves may take; below 0 where choices took too many.
    """
    for _ in range(sweeps):
        changed = False
        for v, own, weight, neighbours in _records(program):
            local = tables[own].copy()
            for u, pair, axis in neighbours:
                local += tables[pair].take(choices[u], axis=1 - axis)
            old = choices[v]
            if weight >= 0:
                memory = tables[weight]
                local += price * memory
                more = memory - memory[old]
                # Choices over the limit may stay so: only moves that take more bytes are barred.
                local[(more > 0) & (more > room)] = math.inf
            best = int(local.argmin())
            # Only a strictly better choice, so that equal ones cannot take turns for ever.
            if local[best] < local[old]:
                if weight >= 0:
                    room -= float(more[best])
                choices[v] = best
                changed = True
        if not changed:
            break


def _records(program: array[int]) -> Iterator[tuple[int, int, int, list[tuple[int, int, int]]]]:
    """The variable, its tables, and its neighbours with their tables and axes."""
    at = 0
    while at < len(program):
        v, own, weight, count = program[at : at + 4]
        at += 4
        ends = program[at : at + 3 * count].tolist()
        yield v, own, weight, list(zip(ends[::3], ends[1::3], ends[2::3], strict=True))
        at += 3 * count
