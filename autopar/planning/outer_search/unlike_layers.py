"""Programs of unlike layers, for solutions of equal layers that need a little too much memory.

    bytes of unlike layers = share * bytes of equal layers

Making one takes as long as playing several solutions. The share is mostly alike for all meshes, so
the first program that fails tells whether the next ones may fit; those that may not wait until
nothing else has fitted.
"""

from __future__ import annotations

import math

from autopar.planning.model.effort import EFFORT
from autopar.planning.solve.solved_candidate import Solved
from autopar.search import Infeasible

from .evaluator import Played
from .incumbents import Incumbents


class UnlikeLayers:
    """Tries unlike layers as long as there is no incumbent.

    `share`: the least share that a failed program needed (0: none failed). `waiting`: solutions
    that may not fit.
    """

    def __init__(self, incumbents: Incumbents) -> None:
        self.incumbents = incumbents
        self.share = 0.0
        self.waiting: list[Solved] = []

    def look_at(self, solved: Solved, error: Infeasible) -> None:
        """Try a solution whose program of equal layers does not fit, or let it wait."""
        excess = _excess(error)
        if self.incumbents or excess > EFFORT.likely:
            return
        if excess * self.share > 1:
            self.waiting.append(solved)
            return
        failure = self._try(solved)
        if failure is not None:
            share = _excess(failure) / excess
            self.share = min(self.share, share) if self.share else share

    def try_waiting(self) -> None:
        """Try the solutions that wait, in their order, until one fits."""
        for solved in self.waiting:
            if not self.incumbents:
                self._try(solved)
        self.waiting.clear()

    def _try(self, solved: Solved) -> Infeasible | None:
        played = Played(solved=solved, seconds=math.inf, limited=True)
        return self.incumbents.challenge(played)


def _excess(error: Infeasible) -> float:
    """Needed bytes as a multiple of the limit."""
    return error.minimum_memory / error.limit if error.limit > 0 else math.inf
