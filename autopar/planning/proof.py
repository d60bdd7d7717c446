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
from .pipeline_bounds import Leaf, PipelineBounds, Proven
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

    def raise_least(self, enough: float, *, alone: bool = False) -> None:
        """Raise the least bound (`alone`: of what has no stages) until it is `enough` or nothing is left that raises it."""
        some = [c for c in self.sure if c.stages == 1 or not alone]
        for _ in range(TUNING.proven):
            least = min(some, key=lambda c: (self.sure[c], c in self.proven), default=None)
            if least is None or self.sure[least] >= enough:
                break
            if least not in self.proven:
                self.raise_by(self._next(least, enough), enough)
            elif least.stages == 1 or self.pipelines.looked > TUNING.looked or not self._within(least, enough):
                break

    def raise_by(self, candidate: Candidate, enough: float = math.inf) -> None:
        """Raise the bounds of a candidate, and of more micro-batches on its mesh, by its solution without a limit of memory."""
        others = [c for c in self.sure if c.place == candidate.place and c.micro_batches >= candidate.micro_batches]
        try:
            if candidate.stages == 1:
                found = self.bounds.proven(candidate)
                self.sure.update((other, max(self.sure[other], found)) for other in others)
            else:
                self._carry(self.pipelines.passed(candidate, enough=enough), others)
                if any(self.sure[other] < enough for other in others):
                    self._carry(self.pipelines.proven(candidate, enough=enough), others)
        except NoAssignment:
            self.sure[candidate] = math.inf
        if candidate.stages == 1 or self.sure[candidate] < enough:
            self.proven.add(candidate)

    def _carry(self, proven: Proven, others: Iterable[Candidate]) -> None:
        self.sure.update((other, max(self.sure[other], self.pipelines.carried(proven, other))) for other in others)

    def _next(self, least: Candidate, enough: float) -> Candidate:
        """Of the candidates with bounds near the least on its mesh the one with the middle number of micro-batches; first, as it mostly
        rules out all with more, the one with the fewest that the mesh's first axis cannot split."""
        mine = sorted((c for c in self.sure if c.place == least.place), key=lambda c: c.micro_batches)
        split = self.bounds.folded.batch // least.mesh.shape[0] if least.mesh.shape else self.bounds.folded.batch
        beyond = next((c for c in mine if c.micro_batches > split), None)
        near = [c for c in mine if self.sure[c] <= (1 + TUNING.alike) * self.sure[least] and self.sure[c] < enough and c not in self.proven]
        return beyond if beyond in near else near[len(near) // 2]

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
