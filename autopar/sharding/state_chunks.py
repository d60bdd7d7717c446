"""Chunks of the optimizer's state in host memory, which the runtime streams one by one, as the
price assumes.
"""

from __future__ import annotations

from collections.abc import Sequence


def chunks(sizes: Sequence[float]) -> list[slice]:
    """Join neighbours to chunks of at most the largest size, so that chunks are about equal."""
    # The largest state needs this much room whatever else is done, so chunks up to it need no more.
    limit = max(sizes, default=0)
    # The last chunk is still open while the loop runs.
    closed: list[slice] = []
    start = 0
    held = 0.0
    for index, size in enumerate(sizes):
        if index > start and held + size > limit:
            closed.append(slice(start, index))
            start = index
            held = 0.0
        held += size
    return [*closed, slice(start, len(sizes))] if sizes else []
