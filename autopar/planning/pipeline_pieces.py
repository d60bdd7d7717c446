"""Where a model may be cut into stages: before operators to which little is handed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .operator_costs import OperatorCosts

MAX_PIECES = 400
"""The most pieces of a model; cuts that hand on most bytes are dropped."""
FEW = 4
"""With fewer pieces for each stage, a model is also cut where the handed bytes stay equal."""


def pieces_of(figures: Sequence[OperatorCosts], stages: int) -> NDArray[np.int64]:
    """The operators before which the model may be cut, with both ends.

    A cut is at a minimum of the handed bytes. If that gives a stage few pieces, as in a chain of equally wide layers, a
    cut may also be where the bytes stay equal.
    """
    handed = np.max([f.handed for f in figures], axis=0)
    busy = np.sum([f.forward + f.backward + f.stored for f in figures], axis=0)
    work, count = np.concatenate(([0.0], np.cumsum(busy))), len(handed) - 1
    before, here, behind = handed[:-2], handed[1:-1], handed[2:]
    low = (here <= before) & (here <= behind)
    for places in (low & ((here < before) | (here < behind)), low):
        found = np.arange(1, count)[places]
        # Cuts with no work between them are one.
        found = found[np.concatenate(([True], np.diff(work[found]) > 0.0))] if len(found) else found
        if len(found) + 1 >= FEW * stages:
            break
    if len(found) > MAX_PIECES:
        found = np.sort(found[np.argsort(handed[found], kind="stable")[:MAX_PIECES]])
    return np.concatenate(([0], found, [count]))
