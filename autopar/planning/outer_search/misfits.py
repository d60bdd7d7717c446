"""Cases that do not fit the memory, and unlike layers for those that nearly do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.planning.model.effort import EFFORT
from autopar.planning.solve.solved_candidate import Solved
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode
from autopar.search import Infeasible

from .evaluator import Evaluator, Played
from .incumbents import Incumbents


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A case that does not fit the memory, and the least bytes that it needs on a device.

    `bounded`: the bytes are a bound from below, which no solution shows to do.
    """

    candidate: Candidate
    mode: Mode
    needed: float
    bounded: bool = False


class UnlikeLayers:
    """Tries unlike layers for solutions that came before anything fitted.

    Whole graphs take long to solve, so that they wait for what fits without them, and for a proof
    that they may be faster.
    """

    def __init__(self, evaluator: Evaluator, incumbents: Incumbents) -> None:
        self.evaluator = evaluator
        self.incumbents = incumbents
        self._waiting: list[tuple[Solved, float]] = []

    def look_at(self, solved: Solved, error: Infeasible) -> None:
        """Let a solution wait whose program of equal layers does not fit."""
        likely = EFFORT.likely * self.evaluator.solver.room(solved.candidate)
        if not self.incumbents and error.minimum_memory <= likely:
            self._waiting.append((solved, error.minimum_memory))

    def try_waiting(self) -> None:
        """Try the solutions that wait, the best promise first."""
        # The best promise makes the others hardest to be worth their work.
        for solved, needed in sorted(self._waiting, key=lambda near: near[0].promise):
            enough = self.incumbents.enough
            if not self.incumbents or self.evaluator.may_fit(solved, needed, enough):
                self.incumbents.challenge(Played(solved=solved, seconds=math.inf, limited=True))
        self._waiting.clear()
