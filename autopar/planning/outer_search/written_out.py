"""Programs without stages, written out for the whole graph from folded solutions."""

from __future__ import annotations

from dataclasses import replace

from autopar.planning.programs.priced_program import DraftProgram
from autopar.planning.programs.whole_graph import unfold
from autopar.planning.solve.solved_candidate import Solved
from autopar.planning.space.candidates import Candidate
from autopar.sharding.schedule import Schedule

from .candidate_solver import CandidateSolver

Key = tuple[Candidate, Schedule, tuple[int, ...]]
"""A candidate, the schedule inside a stage, and the choices.

Choices of host memory come behind those of the device, so that they are numbers of their own.
"""


class WrittenOut:
    """Written-out programs of a search; their seconds are remembered, of programs the last one."""

    def __init__(self, solver: CandidateSolver) -> None:
        self.solver = solver
        self._seconds: dict[Key, float] = {}
        self._last: tuple[Key, DraftProgram] | None = None

    def seconds(self, solved: Solved) -> float:
        """Seconds of a step of the program, as if memory were no question."""
        key = self._key(solved)
        if key not in self._seconds:
            self._seconds[key] = self.program(solved).timeline.step
        return self._seconds[key]

    def program(self, solved: Solved) -> DraftProgram:
        """The program of a folded solution, with all the recompute of its mode."""
        key = self._key(solved)
        # Programs are large, so only the last one is remembered.
        if self._last is None or self._last[0] != key:
            folded = self.solver.folded
            candidate = solved.candidate
            analysis = folded.analysis(short=False, micro_batches=candidate.micro_batches)
            tables, choices = unfold(
                solved.tables, solved.solution.choices, folded.folding, analysis
            )
            solution = replace(solved.solution, choices=choices)
            self._last = key, DraftProgram.decoded(tables, solution, self._schedule(solved))
        return self._last[1]

    def _schedule(self, solved: Solved) -> Schedule:
        return self.solver.schedule_of(solved.candidate, solved.mode, short=False)

    def _key(self, solved: Solved) -> Key:
        return solved.candidate, self._schedule(solved), solved.solution.choices
