"""The modes of candidates that are worth solving: those that memory asks for.

A mode that does all the work of another one (`Mode.repeats`) saves memory, and hardly any time. So
it waits while the other one's optimum without a limit of memory fits, until that one's program
turns out not to fit, or to be near the best.
"""

from __future__ import annotations

from collections import defaultdict

from autopar.planning.solve.solved_candidate import Case
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode


class ModesInTurn:
    """Which modes of the candidates were reached, fit without a limit, or wait for one that does.

    `tried`: cases that entered the queue.
    """

    def __init__(self) -> None:
        self.tried: set[tuple[Candidate, Mode]] = set()
        self._free: defaultdict[Candidate, list[Mode]] = defaultdict(list)
        self._waiting: defaultdict[Candidate, list[tuple[float, Case]]] = defaultdict(list)

    def reach(self, candidate: Candidate, mode: Mode) -> bool:
        """Note a mode; whether it is reached for the first time."""
        if (candidate, mode) in self.tried:
            return False
        self.tried.add((candidate, mode))
        return True

    def fits_freely(self, case: Case) -> None:
        """Note that memory does not bind the optimum of a case."""
        self._free[case.candidate].append(case.mode)

    def waits(self, promise: float, case: Case) -> bool:
        """Whether a case saves memory that is not short; it then waits."""
        candidate = case.candidate
        if not any(case.mode.repeats(mode) for mode in self._free[candidate]):
            return False
        self._waiting[candidate].append((promise, case))
        return True

    def go_on(self, case: Case) -> list[tuple[float, Case]]:
        """The cases that waited for one, with their promises; from now on none does."""
        candidate = case.candidate
        if case.mode not in self._free[candidate]:
            return []
        self._free[candidate].remove(case.mode)
        return self._waiting.pop(candidate, [])
