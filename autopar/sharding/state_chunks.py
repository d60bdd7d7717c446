"""Chunks of the optimizer's state in host memory: the runtime streams them one at a time, and the price assumes the
same.
"""

from __future__ import annotations

from collections.abc import Sequence


def chunks(sizes: Sequence[float]) -> list[slice]:
    """Join neighbours to chunks of at most the largest size, so that chunks are about equal and none holds up the
    others.

    >>> [[5, 1, 1, 7, 2][chunk] for chunk in chunks([5, 1, 1, 7, 2])]
    [[5, 1, 1], [7], [2]]
    """
    limit = max(sizes, default=0)
    found: list[slice] = []
    start, held = 0, 0.0
    for index, size in enumerate(sizes):
        if index > start and held + size > limit:
            found.append(slice(start, index))
            start, held = index, 0.0
        held += size
    return [*found, slice(start, len(sizes))] if sizes else []
