"""The incumbents of a search: the programs that were the fastest so far.

On the whole graph a pipeline may take longer than its folded cuts: what is compared is the program
that would be the plan.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.planning.model.effort import EFFORT
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode
from autopar.search import Infeasible

from .evaluator import Played
from .whole_programs import Program, WholePrograms


class Incumbents:
    """The incumbents, the fastest first: their `programs`, and their solutions as `played`.

    `fastest`: the fastest solution of each candidate, as it was played. `failures`: of whole
    programs.
    """

    def __init__(self, whole: WholePrograms) -> None:
        self.whole = whole
        self.programs: list[Program] = []
        self.played: list[Played] = []
        self.fastest: dict[Candidate, Played] = {}
        self.failures: list[Infeasible] = []
        self._challengers: list[Played] = []

    def __bool__(self) -> bool:
        return bool(self.played)

    @property
    def best(self) -> float:
        """Seconds of the incumbent's step."""
        return self.played[0].seconds if self.played else math.inf

    @property
    def enough(self) -> float:
        """A promise that is not below this is not looked at."""
        return (1 - EFFORT.close) * self.best

    def mode_of(self, program: Program) -> Mode | None:
        """The mode of an incumbent; None of any other program."""
        for own, played in zip(self.programs, self.played, strict=True):
            if own is program:
                return played.solved.mode
        return None

    def note(self, played: Played) -> None:
        """Remember the fastest program of each candidate; one below the best is a challenger."""
        candidate = played.solved.candidate
        fastest = self.fastest.setdefault(candidate, played)
        if played.seconds < fastest.seconds:
            self.fastest[candidate] = played
        if played.seconds < self.best:
            self._challengers.append(played)

    def settle(self) -> None:
        """Compare the challengers with the incumbent, the fastest first.

        Whole programs take long to make, so of several challengers mostly one is made.
        """
        for played in sorted(self._challengers, key=lambda one: one.seconds):
            # The one before may have become the incumbent.
            if played.seconds < self.best:
                self.challenge(played)
        self._challengers.clear()

    def challenge(self, played: Played) -> None:
        """Compare the whole program of a solution with the incumbent, if one fits."""
        try:
            program = self.whole.program(played)
        except Infeasible as error:
            self.failures.append(error)
            return
        if program.seconds < self.best:
            self.programs.insert(0, program)
            self.played.insert(0, replace(played, seconds=program.seconds))
