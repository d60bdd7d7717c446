"""Chunks of the optimizer's state in host memory: the runtime streams them singly, as the price assumes."""

from __future__ import annotations

from collections.abc import Sequence


def chunks(sizes: Sequence[float]) -> list[slice]:
    """Join neighbours to chunks of at most the largest size, so that chunks are about equal."""
    limit = max(sizes, default=0)
    found: list[slice] = []
    start, held = 0, 0.0
    for index, size in enumerate(sizes):
        if index > start and held + size > limit:
            found.append(slice(start, index))
            start, held = index, 0.0
        held += size
    return [*found, slice(start, len(sizes))] if sizes else []
