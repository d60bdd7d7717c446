"""Raises the bounds of candidates by solutions of their own, the least bound first.

What is proven of some number of micro-batches also holds for more on the same mesh. The solutions
have no limit of memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from autopar.planning.model.effort import EFFORT
from autopar.planning.model.stops import Aim, Clock
from autopar.planning.space import Candidate
from autopar.search import NoAssignment

from .by_mesh import Bounds
from .with_stages import PipelineBounds, Proven


class Proof:
    """Raises the bounds `sure` of candidates by solutions of their own.

    `aim`, `clock`: when the search ends. `proven`: the candidates solved without a limit of memory.
    """

    def __init__(
        self,
        sure: dict[Candidate, float],
        bounds: Bounds,
        aim: Aim | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.sure = sure
        self.bounds = bounds
        self.aim = aim or Aim()
        self.clock = clock or Clock()
        self.pipelines = PipelineBounds(bounds)
        self.proven: set[Candidate] = set()

    def raise_least(self, enough: float, *, alone: bool = False) -> None:
        """Raise the least bound until it is `enough`, or until nothing raises it any more.

        `alone`: only candidates of one stage are looked at.
        """
        candidates = [c for c in self.sure if self.bounds.cover(c) and (c.stages == 1 or not alone)]
        for number in itertools.count():
            self.clock.look()
            if number >= EFFORT.proven and not self.aim.is_patient:
                break
            # Of equal bounds, one that was not solved yet is easier to raise.
            least = min(candidates, key=lambda c: (self.sure[c], c in self.proven), default=None)
            if least is None or self.sure[least] >= enough:
                break
            if least in self.proven:
                break
            self.raise_by(self._next(least, enough), enough)

    def raise_by(self, candidate: Candidate, enough: float = math.inf) -> None:
        """Raise the bounds of a candidate, and of more micro-batches on its mesh.

        They are raised by the candidate's solution without a limit of memory.
        """
        following = [
            c
            for c in self.sure
            if c.place == candidate.place and c.micro_batches >= candidate.micro_batches
            if c == candidate or self.bounds.carries(candidate, c)
        ]
        try:
            if candidate.stages == 1:
                proven = ((c, self.bounds.proven(candidate, c)) for c in following)
                self.sure.update(
                    (c, max(self.sure[c], bound + self.bounds.forced(c))) for c, bound in proven
                )
            else:
                self._raise_staged(candidate, following, enough)
        # Pins leave it nothing to choose: it has no plan at all.
        except NoAssignment:
            self.sure[candidate] = math.inf
        if candidate.stages == 1 or self.sure[candidate] < enough:
            self.proven.add(candidate)

    def _raise_staged(
        self, candidate: Candidate, following: list[Candidate], enough: float
    ) -> None:
        """Raise the bounds of candidates with stages, by the passes alone if that is enough."""
        # The passes alone take half the time, and mostly suffice.
        self._carry(self.pipelines.passed(candidate, enough=enough), following)
        if any(self.sure[c] < enough for c in following):
            self._carry(self.pipelines.proven(candidate, enough=enough), following)

    def _carry(self, proven: Proven, candidates: Iterable[Candidate]) -> None:
        """Raise the bounds of candidates by what is proven of their mesh."""
        self.sure.update(
            (c, max(self.sure[c], self.pipelines.carried(proven, c))) for c in candidates
        )

    def _next(self, least: Candidate, enough: float) -> Candidate:
        """Return the candidate on the mesh of the least bound that is best solved next.

        Of those with the least bound it is the one with the middle number of micro-batches.
        Before these comes the one with the fewest that the mesh's first axis cannot split: it
        mostly rules out all candidates with more.
        """
        on_mesh = sorted(
            (c for c in self.sure if c.place == least.place), key=lambda c: c.micro_batches
        )
        split = self.bounds.folded.batch
        if least.mesh.shape:
            split //= least.mesh.shape[0]
        beyond = next((c for c in on_mesh if c.micro_batches > split), None)
        equal = [
            c
            for c in on_mesh
            if self.sure[c] <= self.sure[least] and self.sure[c] < enough and c not in self.proven
        ]
        return beyond if beyond in equal else equal[len(equal) // 2]
