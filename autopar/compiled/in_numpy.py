"""The min-plus kernel in numpy, in place and in blocks: the reference of the compiled one."""

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
BLOCK = 1 << 15
"""Entries of the plane that is updated in place: two such float64 planes stay in a second-level
cache of 1 MiB.
"""
SMALL = 1 << 16
"""The most entries of a sum that is made at once: one numpy call a table, instead of one a table
and choice.
"""


def minimise(out: Table, terms: tuple[Table, ...]) -> None:
    """Write to `out` the minimum over axis 0 of the sum of the terms.

    A term has all axes, of size 1 where it does not depend on one.
    """
    size = terms[0].shape[0]
    if len(terms) == 1 or size * math.prod(out.shape) <= SMALL:
        out[...] = functools.reduce(np.add, terms).min(axis=0)
        return
    # A large sum never exists whole: for each block of rows, one plane a choice is added up and
    # minimised.
    rows = max(1, BLOCK * out.shape[0] // math.prod(out.shape))
    plane = np.empty((min(rows, out.shape[0]), *out.shape[1:]))
    for start in range(0, out.shape[0], rows):
        block = [term if term.shape[1] == 1 else term[:, start : start + rows] for term in terms]
        target = out[start : start + rows]
        _sum(block, 0, target)
        scratch = plane[: len(target)]
        for k in range(1, size):
            _sum(block, k, scratch)
            np.minimum(target, scratch, out=target)


def _sum(block: Sequence[Table], k: int, out: Table) -> None:
    np.add(block[0][k], block[1][k], out=out)
    for term in block[2:]:
        np.add(out, term[k], out=out)
