"""How the optimizer's state in host memory is cut into what is streamed at once, by the runtime and in its price alike."""

from __future__ import annotations

from collections.abc import Sequence


def chunks(sizes: Sequence[float]) -> list[slice]:
    """Neighbours joined to chunks of at most the largest size, so that all are about as large and none makes the others wait.

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
