"""The outer search: best first over the candidates.

In: a folded model and a request. Out: the best program, and a bound on all others.
"""

from .misfits import surely_misfits
from .pools import Outcome, search_pools

__all__ = ["Outcome", "search_pools", "surely_misfits"]
