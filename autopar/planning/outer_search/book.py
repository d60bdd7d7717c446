"""Books of bounds: for every candidate, seconds that none of its plans undercuts.

Exchanges of experts count in full in one book, which orders the search. Where they may run under
other computation, plans are bounded by another book, in which they cost nothing.

A bound only rises. It is raised by four means, the cheapest first: the arithmetic alone, one
solution for a mesh, a solution of the candidate's own, and solutions within the memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from autopar.planning.bounds.proof import Proof
from autopar.planning.model.effort import EFFORT
from autopar.planning.model.stops import Aim, Clock
from autopar.planning.space.candidates import Candidate
from autopar.search import NoAssignment

from .bound_within import surely
from .candidate_solver import CandidateSolver


class Book:
    """The bounds of a search; `sure`: seconds by candidate. `aim`, `clock`: when it ends.

    They are of plans whose exchanges of experts hide where those of the `solver` do, else of plans
    whose exchanges count in full.
    """

    def __init__(
        self, solver: CandidateSolver, aim: Aim | None = None, clock: Clock | None = None
    ) -> None:
        self.solver = solver
        self.aim = aim or Aim()
        self._within: set[Candidate] = set()
        self.sure: dict[Candidate, float] = {}
        # The proof raises the bounds in this same mapping.
        self.proof = Proof(self.sure, solver.bounds, self.aim, clock)

    @property
    def least(self) -> float:
        """Seconds that no candidate undercuts."""
        return min((self.sure[candidate] for candidate in self._covered()), default=math.inf)

    @property
    def held_by(self) -> Candidate | None:
        """The candidate of the least bound."""
        return min(self._covered(), key=lambda c: self.sure[c], default=None)

    def _covered(self, stages: int | None = None) -> list[Candidate]:
        """The candidates that have plans of the kind that the book is of (of so many stages)."""
        cover = self.solver.bounds.cover
        return [c for c in self.sure if stages in (None, c.stages) and cover(c)]

    def enter(self, group: Sequence[Candidate]) -> None:
        """Bound the candidates of a mesh by the arithmetic alone."""
        bounds = self.solver.bounds
        for candidate in group:
            # Bounds of plans that hide nothing order the search, whether there are such plans.
            if not bounds.hiding or bounds.cover(candidate):
                self.sure[candidate] = bounds.least_waiting(candidate)

    def bound_mesh(self, group: Sequence[Candidate]) -> list[Candidate]:
        """Bound the candidates of a mesh by one solution; the candidates that pins allow.

        Pins may forbid the first numbers of micro-batches: 12 samples on 4 devices are 3 times 4,
        but not 2 times 6.
        """
        for number, first in enumerate(group):
            allowed = list(group[number:])
            try:
                bounds = [self.solver.bounds.bound(c, first.micro_batches) for c in allowed]
            except NoAssignment:
                # No plan can have it, so its bound must not hold down the least of all.
                self.sure.pop(first, None)
                continue
            for candidate, bound in zip(allowed, bounds, strict=True):
                self.sure[candidate] = max(self.sure.get(candidate, 0.0), bound)
            return allowed
        return []

    def close_in(self, incumbent: float, most: float = math.inf) -> None:
        """Raise the least bounds while that may raise the least of all, up to the incumbent.

        Above `most` seconds they need not rise.
        """
        enough = min(self.aim.enough(incumbent), most)
        within = functools.partial(surely, self.solver)
        while len(self._within) < EFFORT.within or self.aim.is_patient:
            self.proof.raise_least(enough, alone=True)
            least = min(self._covered(stages=1), key=lambda c: self.sure[c], default=None)
            if least is None or least in self._within or self.sure[least] >= enough:
                break
            self._within.add(least)
            self.sure[least] = max(self.sure[least], within(least, self.sure[least], enough))
        # Pipelines need not be raised above the least of what has no stages.
        floor = min((self.sure[c] for c in self._covered(stages=1)), default=math.inf)
        self.proof.raise_least(min(enough, floor))
