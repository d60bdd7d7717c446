"""Where the candidates of a search stand: which wait, with bounds that order them, and what is sure of each.

A bound is raised as far as it pays: by the arithmetic alone, by one solution of a mesh, by a candidate's own solution (`proof.py`), and,
without stages, by its solution within the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.search import NoAssignment

from .bounds import Bounds
from .candidates import LARGE, Candidate
from .folded_model import FoldedModel
from .proof import Modes, Proof, Room
from .ranking import Ranking
from .tuning import TUNING


class Standing:
    """The bounds of all candidates.

    `waiting`: the unsolved candidates with the bounds that order them. `sure`: bounds of all. `ahead`: a bound of those without one yet.
    `proof`: raises what is sure.
    """

    def __init__(self, bounds: Bounds, ranking: Ranking, room: Room, modes: Modes) -> None:
        self.bounds, self.ranking = bounds, ranking
        self.waiting: dict[Candidate, float] = {}
        self.sure: dict[Candidate, float] = {}
        self.ahead = math.inf
        self.proof = Proof(self.sure, bounds, room, modes)

    @property
    def best(self) -> float:
        """Seconds of the best that is known."""
        return self.ranking.solved[0].seconds if self.ranking.solved else math.inf

    @property
    def least(self) -> float:
        """Seconds that no candidate undercuts."""
        return min([self.ahead, *self.sure.values(), *(s.seconds for s in self.ranking.solved[:1])], default=0.0)

    def far(self, folded: FoldedModel) -> float:
        """Seconds by the tables from which on a solution is not looked at; programs of small models may take longer than these promise."""
        return (TUNING.closer if folded.is_small else TUNING.cut) * self.best

    def beaten(self, folded: FoldedModel) -> float:
        """Seconds of equal stages from which on a pipeline is not cut."""
        return self.far(folded) if folded.is_small else (1 + TUNING.close) * self.best

    def may_win(self, bound: float) -> bool:
        """Whether a candidate of that bound may be better than the best by more than `close`."""
        return bound < (1 - TUNING.close) * self.best

    def promises(self, bound: float, candidate: Candidate) -> bool:
        """The same; without stages, whether it may be as near to the best."""
        return self.may_win(bound) or (candidate.stages == 1 and bound < (1 + TUNING.close) * self.best)

    def of_group(self, group: Sequence[Candidate]) -> float:
        """The least bound of those of a mesh that wait."""
        return min((self.waiting[candidate] for candidate in group if candidate in self.waiting), default=math.inf)

    def enter(self, group: Sequence[Candidate]) -> list[Candidate]:
        """Bound the candidates of a mesh; those that are left: the pins may forbid the first numbers of micro-batches (12 samples on 4
        devices are 3 times 4, but not 2 times 6)."""
        if group[0].stages > 1 and self.best < math.inf and group[0].cluster.devices <= LARGE:
            return self._enter_stages(group)
        for number, first in enumerate(group):
            try:
                found = {candidate: self.bounds.bound(candidate, first.micro_batches) for candidate in group[number:]}
            except NoAssignment:
                continue
            self.waiting.update(found)
            self.sure.update(found)
            return list(found)
        return []

    def _enter_stages(self, group: Sequence[Candidate]) -> list[Candidate]:
        """Bound pipelines beside a plan that is known: by the arithmetic, and those that may be better by the solution of the first."""
        found = {candidate: self.bounds.least_waiting(candidate) for candidate in group}
        self.sure.update(found)
        self.waiting.update(found)
        for first in group:
            if self.may_win(self.sure[first]):
                self._prove(first)
                if self.sure[first] < math.inf:
                    break
        left = [candidate for candidate in group if self.sure[candidate] < math.inf]
        for candidate in set(group).difference(left):
            del self.waiting[candidate], self.sure[candidate]
        return left

    def is_out(self, candidate: Candidate) -> bool:
        """Whether solutions of a pipeline, without a limit and with all hidden that may be, prove that it is no better than the best."""
        if candidate.stages == 1 or candidate.cluster.devices > LARGE or self.best == math.inf:
            return False
        # What is proven of fewer micro-batches holds of more: the middle one first.
        fewer = [c for c in self.waiting if c.place == candidate.place and c.micro_batches <= candidate.micro_batches]
        near = sorted((c for c in fewer if c not in self.proof.proven and self.may_win(self.sure[c])), key=lambda c: c.micro_batches)
        for one in dict.fromkeys((near[(len(near) - 1) // 2], candidate) if near else ()):
            self._prove(one)
            if not self.may_win(self.sure[candidate]):
                return True
        return False

    def _prove(self, candidate: Candidate) -> None:
        """Raise what is sure of a candidate, and of more micro-batches on its mesh, by a solution of its own."""
        self.proof.raise_by(candidate, (1 - TUNING.close) * self.best)
        for other in self.waiting:
            if other.place == candidate.place:
                self.waiting[other] = max(self.waiting[other], self.sure[other])

    def tighten(self, candidate: Candidate) -> None:
        """Bound those that wait with more micro-batches on the same mesh by a candidate's solution, as these are no faster."""
        if candidate not in self.bounds.free:
            return
        for other, bound in self.waiting.items():
            if other.place == candidate.place and other.micro_batches > candidate.micro_batches:
                self.waiting[other] = max(bound, self.bounds.bound(other, candidate.micro_batches))

    def raise_least(self, within: Callable[[Candidate, float, float], float]) -> None:
        """Raise the least of what is sure: by solutions without a limit, and what has no stages by solutions `within` the memory."""
        enough = (1 - TUNING.close) * self.best
        done: set[Candidate] = set()
        while len(done) < TUNING.within:
            self.proof.raise_least(enough, alone=True)
            least = min((c for c in self.sure if c.stages == 1), key=lambda c: self.sure[c], default=None)
            if least is None or least in done or not self.may_win(self.sure[least]):
                break
            done.add(least)
            self.sure[least] = max(self.sure[least], within(least, self.sure[least], enough))
        # Pipelines need not be raised above the least of what has no stages.
        floor = min((bound for c, bound in self.sure.items() if c.stages == 1), default=math.inf)
        self.proof.raise_least(min(enough, floor))
