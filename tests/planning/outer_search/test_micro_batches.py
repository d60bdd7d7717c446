"""A solution of one number of micro-batches bounds larger ones."""

from __future__ import annotations

from autopar.costmodel import load_cluster
from autopar.planning.model.request import Request
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.outer_search.micro_batches import MicroBatches
from autopar.planning.planner import folded_of
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.groups import CandidateGroups
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

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


def test_a_solution_bounds_as_many_micro_batches_and_more() -> None:
    numbers, few = entered()
    numbers.tighten(few[1], 1.0)
    promises = [numbers.promise(one) for one in few]
    assert promises[0] == 0 and min(promises[1:]) > 0
    # Bounds only rise.
    numbers.tighten(few[1], 0.5)
    assert [numbers.promise(one) for one in few] == promises
