"""The operators before which a model may be cut into stages, as little is handed on to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .operator_costs import OperatorCosts

MAX_PIECES = 400
"""The most pieces of a model; the cuts that hand on most bytes are dropped."""
FEW = 4
"""The pieces for each stage below which a model is also cut where the handed bytes stay equal."""


def pieces_of(
    figures: Sequence[OperatorCosts], stages: int, places: Sequence[range] | None = None
) -> NDArray[np.int64]:
    """Return the operators before which the model may be cut, with both ends.

    `places`: the only ones, each with the operators before one of which it is cut.

    A cut is at a minimum of the handed bytes. If that gives a stage few pieces, as in a chain of
    equally wide layers, a cut may also be where the bytes stay equal.
    """
    handed = np.max([f.handed for f in figures], axis=0)
    if places is not None:
        least = [place[int(np.argmin(handed[place.start : place.stop]))] for place in places]
        return np.array([0, *least, len(handed) - 1])
    busy = np.sum([f.forward + f.backward + f.stored for f in figures], axis=0)
    work = np.concatenate(([0.0], np.cumsum(busy)))
    count = len(handed) - 1
    before = handed[:-2]
    here = handed[1:-1]
    behind = handed[2:]
    low = (here <= before) & (here <= behind)
    for places in (low & ((here < before) | (here < behind)), low):
        cuts = np.arange(1, count)[places]
        if len(cuts):
            # Cuts with no work between them are one.
            cuts = cuts[np.concatenate(([True], np.diff(work[cuts]) > 0.0))]
        if len(cuts) + 1 >= FEW * stages:
            break
    # The tables of all stages grow with the square of the number of pieces.
    if len(cuts) > MAX_PIECES:
        cuts = np.sort(cuts[np.argsort(handed[cuts], kind="stable")[:MAX_PIECES]])
    return np.concatenate(([0], cuts, [count]))
