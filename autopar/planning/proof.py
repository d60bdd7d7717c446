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
from .solved import Mode
from .tuning import TUNING

Room = Callable[[Candidate], float]
Modes = Callable[[int], Iterable[Mode]]


def prove(sure: dict[Candidate, float], bounds: Bounds, best: float, room: Room, modes: Modes) -> None:
    """Raise the least of the bounds `sure`, as often as is worth while: until it is as near to the `best` step as what the walk leaves.

    `room`: bytes of all stages of a candidate. `modes`: those of so many micro-batches.
    """
    _Proof(sure, bounds, (1 - TUNING.close) * best, room, modes).run()


class _Proof:
    def __init__(self, sure: dict[Candidate, float], bounds: Bounds, enough: float, room: Room, modes: Modes) -> None:
        self.sure, self.bounds, self.enough, self.room, self.modes = sure, bounds, enough, room, modes
        self.pipelines = PipelineBounds(bounds)
        self.proven: set[Candidate] = set()
        self.leaves: dict[Candidate, list[Leaf]] = {}

    def run(self) -> None:
        """Look at the least bound, again and again."""
        for _ in range(TUNING.proven):
            least = min(self.sure, key=lambda c: (self.sure[c], c in self.proven), default=None)
            if least is None or self.sure[least] >= self.enough:
                break
            try:
                if least not in self.proven:
                    self._free(least)
                elif not self._limit(least):
                    break
            except NoAssignment:
                self.sure[least] = math.inf

    def _free(self, least: Candidate) -> None:
        """Prove something, without a limit of memory, of the mesh of the least bound: of those with near bounds the middle one is first."""
        most = min((1 + TUNING.alike) * self.sure[least], self.enough)
        near = [c for c in self.sure if c.place == least.place and self.sure[c] <= most and c not in self.proven]
        chosen = sorted(near, key=lambda c: c.micro_batches)[len(near) // 2]
        self.proven.add(chosen)
        others = [c for c in self.sure if c.place == chosen.place and c.micro_batches >= chosen.micro_batches]
        if chosen.stages == 1:
            found = self.bounds.proven(chosen)
            self.sure.update((other, max(self.sure[other], found)) for other in others)
        else:
            proven = self.pipelines.proven(chosen)
            self.sure.update((other, max(self.sure[other], self.pipelines.carried(proven, other))) for other in others)

    def _limit(self, candidate: Candidate) -> bool:
        """Look at the least leaf of a candidate; whether there was anything to look at."""
        leaves = self.leaves.get(candidate) or self.pipelines.leaves(candidate, self.modes(candidate.micro_batches))
        found = self.pipelines.closer(candidate, leaves, self.room(candidate), self.enough)
        if found is not None:
            self.leaves[candidate] = found
            self.sure[candidate] = max(self.sure[candidate], min(leaf.bound for leaf in found))
        return found is not None
