"""Raises the bound of a search: its least bounds are replaced by solutions of the very candidates.

With m micro-batches and the least bubble b of m's schedules, a mesh of one of p stages takes at the least, of the whole step,

    P(m) = min over strategies of (m + b) X / p        P(m') >= P(m) (1 + b' / m') / (1 + b / m)        for m' > m on the same mesh
"""

from __future__ import annotations

import math

from autopar.search import NoAssignment

from .bounds import Bounds
from .candidates import Candidate
from .tuning import TUNING


def prove(sure: dict[Candidate, float], bounds: Bounds, best: float) -> None:
    """Raise the least of the bounds `sure`, as often as is worth while: until it is as near to the `best` step as what the walk leaves.

    On each mesh the fewest micro-batches come first, as what is proven of them raises the bounds of more.
    """
    proven: set[Candidate] = set()
    for _ in range(TUNING.proven):
        least = min(sure, key=lambda c: (sure[c], c in proven), default=None)
        if least is None or least in proven or sure[least] >= (1 - TUNING.close) * best:
            break
        if not any(other.place == least.place for other in proven):
            low = [c for c in sure if c.place == least.place and sure[c] < (1 - TUNING.close) * best]
            least = min(low, key=lambda c: c.micro_batches)
        proven.add(least)
        try:
            bound = bounds.proven(least)
        except NoAssignment:
            sure[least] = math.inf
            continue
        for other in sure:
            if other.place == least.place and other.micro_batches >= least.micro_batches:
                sure[other] = max(sure[other], bound * _waiting(other, bounds) / _waiting(least, bounds))


def _waiting(candidate: Candidate, bounds: Bounds) -> float:
    """By what the least bubble multiplies the time of the passes."""
    stages, count = candidate.stages, candidate.micro_batches
    return 1 + bounds.least_bubble(stages, count) / count
