"""Modes that only save memory wait for the one whose optimum fits, until its program is played."""

from __future__ import annotations

from autopar.costmodel import load_cluster
from autopar.planning.outer_search.modes_in_turn import ModesInTurn
from autopar.planning.solve.solved_candidate import Case
from autopar.planning.space.candidates import Candidate, meshes
from autopar.planning.space.modes import Mode

CLUSTER = load_cluster("dgx-h100").sized(2)
CANDIDATE = Candidate(cluster=CLUSTER, stages=1, mesh=meshes(CLUSTER)[0], micro_batches=1)


def case(zero: int, recompute: str = "none") -> Case:
    return Case(candidate=CANDIDATE, mode=Mode(zero=zero, recompute=recompute), hidden=0.0)


def test_a_mode_is_reached_once() -> None:
    modes = ModesInTurn()
    assert modes.reach(CANDIDATE, Mode(zero=1, recompute="none"))
    assert not modes.reach(CANDIDATE, Mode(zero=1, recompute="none"))
    assert modes.reach(CANDIDATE, Mode(zero=2, recompute="none"))


def test_what_only_saves_memory_waits_until_the_one_that_fits_is_played() -> None:
    modes = ModesInTurn()
    assert not modes.waits(1.0, case(2))
    modes.fits_freely(case(1))
    # ZeRO 0 does no work of ZeRO 1, so that it may be faster.
    assert not modes.waits(1.0, case(0))
    assert modes.waits(1.0, case(2)) and modes.waits(2.0, case(1, "full"))
    # Nothing waits for a mode that memory binds.
    assert modes.go_on(case(3)) == []
    assert modes.go_on(case(1)) == [(1.0, case(2)), (2.0, case(1, "full"))]
    assert not modes.waits(1.0, case(2)) and modes.go_on(case(1)) == []
