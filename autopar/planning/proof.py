"""Raises the bound of a search: its least bounds are replaced by solutions of the very candidates.

With m micro-batches and the least bubble b of m's schedules, a mesh of one of p stages takes at the least, of the whole step,

    P(m) = min over strategies of (m + b) X / p        P(m') >= P(m) (1 + b' / m') / (1 + b / m)        for m' > m on the same mesh
"""

from __future__ import annotations

import math

from autopar.search import NoAssignment

from .candidates import Candidate
from .trials import Trials
from .tuning import TUNING


def prove(sure: dict[Candidate, float], trials: Trials) -> None:
    """Raise the least of the bounds `sure`, as often as is worth while."""
    proven: set[Candidate] = set()
    for _ in range(TUNING.proven):
        least = min(sure, key=lambda c: (sure[c], c in proven), default=None)
        if least is None or least in proven:
            break
        proven.add(least)
        try:
            bound = trials.proven(least)
        except NoAssignment:
            sure[least] = math.inf
            continue
        for other in sure:
            if other.place == least.place and other.micro_batches >= least.micro_batches:
                sure[other] = max(sure[other], bound * _waiting(other, trials) / _waiting(least, trials))


def _waiting(candidate: Candidate, trials: Trials) -> float:
    """By what the least bubble multiplies the time of the passes."""
    stages, count = candidate.stages, candidate.micro_batches
    return 1 + trials.pipe(stages, count).least_bubble(trials.schedules(stages, count)) / count if stages > 1 else 1.0
