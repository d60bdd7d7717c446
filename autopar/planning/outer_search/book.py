"""The book of bounds: for every candidate, seconds that none of its plans undercuts.

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
    """The bounds of a search; `sure`: seconds by candidate. `aim`, `clock`: when it ends."""

    def __init__(
        self, solver: CandidateSolver, aim: Aim | None = None, clock: Clock | None = None
    ) -> None:
        self.solver = solver
        self.aim = aim or Aim()
        self._within: set[Candidate] = set()
        self.sure: dict[Candidate, float] = {}
        # The proof raises the bounds in this same mapping.
        self.proof = Proof(self.sure, solver.bounds, solver.room, solver.modes(), self.aim, clock)

    @property
    def least(self) -> float:
        """Seconds that no candidate undercuts."""
        return min(self.sure.values(), default=math.inf)

    @property
    def held_by(self) -> Candidate | None:
        """The candidate of the least bound."""
        return min(self.sure, key=lambda c: self.sure[c], default=None)

    def enter(self, group: Sequence[Candidate]) -> None:
        """Bound the candidates of a mesh by the arithmetic alone."""
        for candidate in group:
            self.sure[candidate] = self.solver.bounds.least_waiting(candidate)

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

    def close_in(self, incumbent: float) -> None:
        """Raise the least bounds while that may raise the least of all, up to the incumbent."""
        enough = self.aim.enough(incumbent)
        within = functools.partial(surely, self.solver)
        while len(self._within) < EFFORT.within or self.aim.is_patient:
            self.proof.raise_least(enough, alone=True)
            alone = [candidate for candidate in self.sure if candidate.stages == 1]
            least = min(alone, key=lambda c: self.sure[c], default=None)
            if least is None or least in self._within or self.sure[least] >= enough:
                break
            self._within.add(least)
            self.sure[least] = max(self.sure[least], within(least, self.sure[least], enough))
        # Pipelines need not be raised above the least of what has no stages.
        floor = min((bound for c, bound in self.sure.items() if c.stages == 1), default=math.inf)
        self.proof.raise_least(min(enough, floor))
