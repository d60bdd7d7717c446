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

    What is proven of some micro-batches raises the bounds of more on the same mesh: of those with near bounds the middle one is first.
    """
    proven: set[Candidate] = set()
    for _ in range(TUNING.proven):
        least = min(sure, key=lambda c: (sure[c], c in proven), default=None)
        if least is None or least in proven or sure[least] >= (1 - TUNING.close) * best:
            break
        most = min((1 + TUNING.alike) * sure[least], (1 - TUNING.close) * best)
        near = [c for c in sure if c.place == least.place and sure[c] <= most and c not in proven]
        least = sorted(near, key=lambda c: c.micro_batches)[len(near) // 2]
        proven.add(least)
        raise_bounds(sure, bounds, least)


def raise_bounds(sure: dict[Candidate, float], bounds: Bounds, candidate: Candidate) -> None:
    """Raise what is `sure` of a candidate, and of more micro-batches on the same mesh, by a solution of its own."""
    try:
        bound = bounds.proven(candidate)
    except NoAssignment:
        sure[candidate] = math.inf
        return
    for other in sure:
        if other.place == candidate.place and other.micro_batches >= candidate.micro_batches:
            sure[other] = max(sure[other], bound * bounds.ratio(other, candidate))
