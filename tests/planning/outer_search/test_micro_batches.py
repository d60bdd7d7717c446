"""Which numbers of micro-batches lie next to one that was tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.planning.model.request import Request
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.outer_search.micro_batches import MicroBatches
from autopar.planning.planner import folded_of
from autopar.planning.space.candidates import meshes
from autopar.planning.space.groups import CandidateGroups

TINY = Shape(layers=1, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=512, sequence=64)


@pytest.mark.parametrize(
    ("pinned", "own", "beside"),
    [(None, 1, []), (None, 4, [3, 6]), (None, 8, [6, 12]), (None, 24, [12]), (4, 4, [])],
)
def test_numbers_beside_one(pinned: int | None, own: int, beside: list[int]) -> None:
    graph = transformer(TINY, batch=24).graph
    request = Request(cluster=load_cluster("dgx-h100").sized(4), micro_batches=pinned)
    folded = folded_of(graph, request)
    numbers = MicroBatches(CandidateSolver(folded, request))
    few, every = next(
        place for place in CandidateGroups(folded, request).groups(4) if place[0][0].stages == 1
    )
    numbers.enter(few, every)
    mesh = next(mesh for mesh in meshes(request.cluster) if len(mesh.shape) == 2)
    # A mesh that was split at the end did not enter, and has the same numbers.
    candidate = replace(few[0], mesh=mesh, micro_batches=own)
    assert [one.micro_batches for one in numbers.beside(candidate)] == beside
    assert numbers.beside(replace(candidate, stages=2)) == []
