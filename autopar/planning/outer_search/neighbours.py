"""Neighbours of the fastest candidates: finer meshes.

The search tries meshes of up to two axes, as there are few of them. Of these the fastest are
likely to be split into still faster ones: with experts, for one, an axis of 128 devices may take
nothing that 4 x 32 could.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from autopar.planning.model.effort import EFFORT
from autopar.planning.model.stops import Clock
from autopar.planning.solve.solved_candidate import Case, Solved
from autopar.planning.space.candidates import meshes_for, splits, splits_named
from autopar.search import Infeasible, NoAssignment

from .candidate_solver import CandidateSolver
from .evaluator import Evaluator, Played
from .incumbents import Incumbents
from .modes_in_turn import ModesInTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Tries the neighbours of the fastest candidates of a search.

    `play`: plays a solution, and notes its programs among the `incumbents`.
    """

    evaluator: Evaluator
    incumbents: Incumbents
    modes: ModesInTurn
    clock: Clock
    play: Callable[[Solved], None]

    def try_finer_meshes(self) -> None:
        """Split an axis of the fastest candidates' meshes in two."""
        solver = self.evaluator.solver
        if solver.request.mesh is not None or not self.incumbents:
            return
        for fast in _worth_splitting(self.incumbents.fastest.values()):
            for cases in _finer_cases(solver, fast):
                self.clock.look()
                self._try(cases, fast)
        self.incumbents.settle()

    def _try(self, cases: Iterable[Case], coarser: Played) -> None:
        """Play the cases of a mesh as long as its fastest program may lead to faster ones.

        Where memory binds the `coarser` program, other modes are most of what a finer mesh gains,
        so that its fastest has to be near the best. Else it has to be faster than the coarser one.
        """
        for case in cases:
            # Two meshes may be split into the same one.
            if not self.modes.reach(case.candidate, case.mode):
                continue
            enough = self.incumbents.enough
            with contextlib.suppress(Infeasible, NoAssignment):
                solved = self.evaluator.promise(case, below=enough)
                if solved is not None and solved.promise < enough:
                    self.play(solved)
            near = (1 - EFFORT.close) * coarser.seconds
            if coarser.limited:
                near = EFFORT.behind * self.incumbents.best
            fastest = self.incumbents.fastest.get(case.candidate)
            if fastest is None or fastest.seconds >= near:
                return


def _worth_splitting(programs: Iterable[Played]) -> list[Played]:
    """The fastest programs near the best, and the fastest with and without stages."""
    order = sorted(programs, key=lambda played: played.seconds)
    near = [one for one in order if one.seconds < EFFORT.behind * order[0].seconds]
    alone = [one for one in order if one.solved.candidate.stages == 1]
    staged = [one for one in order if one.solved.candidate.stages > 1]
    # Where memory binds, a finer mesh may be much faster, as it has thriftier choices.
    limited = [one for one in (*alone[:1], *staged[:1]) if one.limited or one in near]
    return list(dict.fromkeys((*near[: EFFORT.split], *limited)))


def _finer_cases(solver: CandidateSolver, played: Played) -> Iterator[list[Case]]:
    """Yield the cases of a program's candidate on each mesh of one axis more.

    The program's own mode is followed by the first one. Where memory binds, all modes come that
    recompute the same. Without stages they take as much for hidden as the program first.
    """
    case = played.solved.case
    candidate = case.candidate
    request = solver.request
    is_finer = splits if request.space is None else splits_named
    every = meshes_for(request, candidate.cluster, candidate.stages)
    finer = [mesh for mesh in every if is_finer(candidate.mesh, mesh)]
    # Each naming of three axes is tried in as many ways as meshes without one.
    ways = len(list(request.space.names(3))) if request.space else 1
    others = [next(solver.modes())]
    if played.limited:
        others = [mode for mode in solver.modes() if mode.recompute == case.mode.recompute]
    modes = dict.fromkeys((case.mode, *others))
    for mesh in finer[: EFFORT.finer * ways]:
        cases = [solver.case(replace(candidate, mesh=mesh), mode) for mode in modes]
        if candidate.stages == 1 and case != solver.case(candidate, case.mode):
            cases = [replace(one, hidden=case.hidden) for one in cases]
        yield cases
