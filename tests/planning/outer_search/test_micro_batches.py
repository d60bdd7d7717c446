"""Which numbers of micro-batches are left out, and taken in again."""

from __future__ import annotations

import math

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.planning.model.request import Request
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.outer_search.micro_batches import MicroBatches
from autopar.planning.planner import folded_of
from autopar.planning.solve.solved_candidate import Case
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.groups import CandidateGroups
from autopar.planning.space.modes import Mode

TINY = Shape(layers=1, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=512, sequence=64)


def entered() -> tuple[MicroBatches, list[Candidate]]:
    """The micro-batches of 24 samples, and the candidates of a mesh of 4 devices."""
    graph = transformer(TINY, batch=24).graph
    request = Request(cluster=load_cluster("dgx-h100").sized(4))
    folded = folded_of(graph, request)
    numbers = MicroBatches(CandidateSolver(folded, request))
    few, _ = next(
        place for place in CandidateGroups(folded, request).groups(4) if place[0][0].stages == 1
    )
    numbers.enter(few)
    return numbers, list(few)


def test_smaller_ones_are_left_out_until_the_programs_of_larger_ones_lack_memory() -> None:
    numbers, few = entered()
    free, stored_whole = (
        Case(candidate=few[0], mode=Mode(zero=zero, recompute="none"), hidden=0.0)
        for zero in (1, 0)
    )
    numbers.tighten(few[0], 1.0)
    promises = [numbers.promise(one) for one in few]
    for case in (free, stored_whole):
        numbers.leave_smaller(case)
    # Bounds that rise meanwhile do not take them in again.
    numbers.tighten(few[0], 0.5)
    assert [numbers.promise(one) for one in few] == [promises[0], *[math.inf] * (len(few) - 1)]
    # Two cases left them out, and one of them still does.
    assert numbers.take_in_smaller(free) == [] and numbers.promise(few[1]) == math.inf
    assert numbers.take_in_smaller(stored_whole) == few[1:]
    assert [numbers.promise(one) for one in few] == promises
    assert numbers.take_in_smaller(stored_whole) == []
