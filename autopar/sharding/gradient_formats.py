"""The formats in which gradients may travel: a floating-point type, or two low-rank factors of each
matrix.

    float32, bfloat16, float16    every element in that type
    powersgd-R                    of a matrix of m x n elements R (m + n), R at most m and n
    powersgd/F                    the same with the largest R that leaves at most a share 1 / F of
                                  the elements

A vector travels whole, as does a matrix too small for its share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from autopar.errors import UsageError, unknown

TYPES = ("float32", "bfloat16", "float16")
_FACTORS = re.compile(r"powersgd(?:-(?P<rank>[1-9]\d*)|/(?P<share>[1-9]\d*(?:\.\d+)?))")


def check_format(name: str) -> str:
    """The name of a format; an unknown one is an error that lists the valid ones."""
    if name not in TYPES and not _FACTORS.fullmatch(name):
        raise UsageError(
            unknown("gradient format", name, (*TYPES, "powersgd-RANK", "powersgd/SHARE"))
        )
    return name


def type_of(name: str | None) -> str | None:
    """The floating-point type that a format asks for, None where it leaves it."""
    return name if name in TYPES else None


def rank_of(name: str | None, shape: Sequence[int]) -> int:
    """The number of columns of a matrix's low-rank factors; 0 if the gradient travels whole.

    >>> rank_of("powersgd-4", (64, 32)), rank_of("powersgd/8", (64, 64))
    (4, 4)
    >>> rank_of("powersgd-4", (4, 4)), rank_of("powersgd-4", (64,))
    (4, 0)
    """
    match = _FACTORS.fullmatch(name or "")
    if match is None or len(shape) < 2:
        return 0
    rows = shape[0]
    # A convolution's weight is taken as the matrix of its first dim by all the rest.
    columns = math.prod(shape[1:])
    if match["rank"]:
        return min(int(match["rank"]), rows, columns)
    # R (m + n) = m n / F, rounded down.
    return int(rows * columns / (rows + columns) / float(match["share"]))
