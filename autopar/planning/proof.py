"""Raises the bound of a search: its least bounds are replaced by solutions of the very candidates, first without a limit of memory.

What is proven of some micro-batches holds of more on the same mesh. Within the memory a candidate is as many leaves as there are modes and
schedules, and its bound is that of the least of them; the least leaf of all is looked at next, until it has nothing left to be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from autopar.search import NoAssignment

from .bounds import Bounds
from .candidates import Candidate
from .pipeline_bounds import Leaf, PipelineBounds
from .solved_candidate import Mode
from .tuning import TUNING

Room = Callable[[Candidate], float]
Modes = Callable[[int], Iterable[Mode]]


class Proof:
    """Raises the bounds `sure` of candidates by solutions of their own.

    `room`: bytes of all stages of a candidate. `modes`: those of so many micro-batches. `proven`: the candidates solved without a limit.
    """

    def __init__(self, sure: dict[Candidate, float], bounds: Bounds, room: Room, modes: Modes) -> None:
        self.sure, self.bounds, self.room, self.modes = sure, bounds, room, modes
        self.pipelines = PipelineBounds(bounds)
        self.proven: set[Candidate] = set()
        self.leaves: dict[Candidate, list[Leaf]] = {}

    def raise_least(self, enough: float) -> None:
        """Raise the least bound, again and again, until it is `enough` or nothing is left that raises it."""
        for _ in range(TUNING.proven):
            least = min(self.sure, key=lambda c: (self.sure[c], c in self.proven), default=None)
            if least is None or self.sure[least] >= enough:
                break
            if least not in self.proven:
                self.raise_by(self._middle(least, enough))
            elif least.stages == 1 or not self._within(least, enough):
                break

    def raise_by(self, candidate: Candidate) -> None:
        """Raise the bounds of a candidate, and of more micro-batches on its mesh, by its solution without a limit of memory."""
        self.proven.add(candidate)
        others = [c for c in self.sure if c.place == candidate.place and c.micro_batches >= candidate.micro_batches]
        try:
            if candidate.stages == 1:
                found = self.bounds.proven(candidate)
                self.sure.update((other, max(self.sure[other], found)) for other in others)
            else:
                proven = self.pipelines.proven(candidate)
                self.sure.update((other, max(self.sure[other], self.pipelines.carried(proven, other))) for other in others)
        except NoAssignment:
            self.sure[candidate] = math.inf

    def _middle(self, least: Candidate, enough: float) -> Candidate:
        """Of the candidates with bounds near the least on its mesh, the one with the middle number of micro-batches."""
        most = min((1 + TUNING.alike) * self.sure[least], enough)
        near = [c for c in self.sure if c.place == least.place and self.sure[c] <= most and c not in self.proven]
        return sorted(near, key=lambda c: c.micro_batches)[len(near) // 2]

    def _within(self, candidate: Candidate, enough: float) -> bool:
        """Raise the bound of a candidate with stages within the memory; whether there was anything left to look at."""
        try:
            leaves = self.leaves.get(candidate) or self.pipelines.leaves(candidate, self.modes(candidate.micro_batches))
            found = self.pipelines.closer(candidate, leaves, self.room(candidate), enough)
        except NoAssignment:
            self.sure[candidate] = math.inf
            return True
        if found is not None:
            self.leaves[candidate] = found
            self.sure[candidate] = max(self.sure[candidate], min(leaf.bound for leaf in found))
        return found is not None
