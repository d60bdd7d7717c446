"""Rows that are priced side by side, a process for each core."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

FEW = 16
"""Rows that are priced at once without further processes."""

T = TypeVar("T")
R = TypeVar("R")


def each(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results of a function for all items, in their order."""
    if len(items) < FEW:
        return [function(item) for item in items]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, items, chunksize=4))
