"""Meshes of one axis more than the search tries: those of the fastest candidates, split.

The search tries meshes of up to two axes, as there are few of them. Of these the fastest are
likely to be split into still faster ones: with experts, for one, an axis of 128 devices may take
nothing that 4 x 32 could.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopar.planning.model.effort import EFFORT
from autopar.planning.solve.solved_candidate import Case
from autopar.planning.space.candidates import meshes_for, splits, splits_named

from .candidate_solver import CandidateSolver
from .evaluator import Played


def worth_splitting(programs: Iterable[Played]) -> list[Played]:
    """The fastest programs near the best, and the fastest with and without stages."""
    order = sorted(programs, key=lambda played: played.seconds)
    near = [one for one in order if one.seconds < EFFORT.behind * order[0].seconds]
    alone = [one for one in order if one.solved.candidate.stages == 1]
    staged = [one for one in order if one.solved.candidate.stages > 1]
    # Where memory binds, a finer mesh may be much faster, as it has thriftier choices.
    limited = [one for one in (*alone[:1], *staged[:1]) if one.limited or one in near]
    return list(dict.fromkeys((*near[: EFFORT.split], *limited)))


def finer_cases(solver: CandidateSolver, played: Played) -> Iterator[list[Case]]:
    """Yield the cases of a program's candidate on each mesh of one axis more.

    The program's own mode is followed by the first one. Where memory binds, all modes come that
    recompute the same.
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
        yield [solver.case(replace(candidate, mesh=mesh), mode) for mode in modes]
