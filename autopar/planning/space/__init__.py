"""The space of the outer search.

In: a request and a folded model. Out: candidates (devices, stages, mesh, micro-batches), their
modes (ZeRO, recompute) and schedules, and how often a step does each part of its work.
"""

from .candidates import Candidate
from .modes import Mode
from .multiplicities import Multiplicities

__all__ = ["Candidate", "Mode", "Multiplicities"]
