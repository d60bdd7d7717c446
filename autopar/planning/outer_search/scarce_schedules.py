"""Faster schedules for pipelines that lack memory for them.

A schedule that waits less keeps more in flight. A pipeline is played under the fastest schedule for
which its solution leaves room; thriftier strategies may be worth a faster one.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planning.model.stops import Clock

from .evaluator import Evaluator, Played
from .incumbents import Incumbents


class ScarceSchedules:
    """Tries thriftier strategies for pipelines near the best, so that a faster schedule fits.

    That takes several solutions and cuts each, so that it waits for the end of a search.
    """

    def __init__(self, evaluator: Evaluator, incumbents: Incumbents, clock: Clock) -> None:
        self.evaluator = evaluator
        self.incumbents = incumbents
        self.clock = clock
        self._waiting: list[Played] = []

    def look_at(self, programs: Sequence[Played]) -> None:
        """Let the fastest program of a case wait, if memory limits its pipeline."""
        if not programs:
            return
        solved = programs[0].solved
        limited = programs[0].limited or not solved.free
        if limited and self.evaluator.solver.scarce_schedules(solved.candidate):
            self._waiting.append(programs[0])

    def try_waiting(self) -> None:
        """Try the pipelines that wait, the fastest first."""
        for played in sorted(self._waiting, key=lambda played: played.seconds):
            enough = self.incumbents.enough
            # A promise is that of the fastest schedule, whatever the memory.
            if played.solved.promise >= enough:
                continue
            self.clock.look()
            faster = self.evaluator.under_scarce_schedules(played, enough)
            if faster is not None:
                self.incumbents.note(faster)
                self.incumbents.settle()
        self._waiting.clear()
