"""Recompute that memory forces: never more than what tables and programs have."""

from __future__ import annotations

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.book import Book
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.space.candidates import Candidate, meshes
from autopar.planning.space.groups import CandidateGroups
from autopar.planning.space.modes import Mode

CLUSTER = load_cluster("dgx-h100").sized(4)
GRAPH = transformer(
    Shape(
        layers=4, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=512, sequence=512, dropout=False
    ),
    batch=16,
).graph
FOLDED = FoldedModel(GRAPH, train=True)


def solver_within(memory: float | None) -> CandidateSolver:
    return CandidateSolver(FOLDED, Request(cluster=CLUSTER, memory=memory))


@pytest.mark.parametrize(("shape", "count"), [((4,), 1), ((2, 2), 4), ((4,), 8)])
def test_no_tables_save_less_than_their_share(shape: tuple[int, ...], count: int) -> None:
    solver = solver_within(None)
    recompute = solver.bounds.recompute
    mesh = next(mesh for mesh in meshes(CLUSTER) if mesh.shape == shape)
    candidate = Candidate(cluster=CLUSTER, stages=1, mesh=mesh, micro_batches=count)
    assert recompute.recomputes == ["none", "selective", "full"]
    for kind in recompute.recomputes:
        case = solver.case(candidate, Mode(zero=3, recompute=kind))
        share = recompute._of(kind).saved / count / mesh.devices
        assert 0.9 * share <= solver.tables(case).least_saved() <= 4 * share or count > 4
        assert solver.tables(case).least_saved() >= share * (1 - 1e-9)


def test_what_is_forced_rises_as_memory_falls_and_is_not_carried_on() -> None:
    ample = solver_within(None)
    whole, part = (
        Candidate(cluster=CLUSTER, stages=1, mesh=meshes(CLUSTER)[0], micro_batches=count)
        for count in (1, 16)
    )
    assert ample.bounds.forced(whole) == 0.0
    recompute = ample.bounds.recompute
    needed = recompute._of("none").saved / 4
    tight = solver_within(0.5 * needed + FOLDED.parameters)
    assert tight.bounds.forced(whole) > 0.0 == tight.bounds.forced(part)
    book = Book(tight)
    for few, _ in CandidateGroups(FOLDED, tight.request).groups(4):
        book.enter(few)
    before = book.sure[part]
    book.proof.raise_by(whole)
    assert book.sure[whole] >= tight.bounds.proven(whole) + tight.bounds.forced(whole)
    assert before <= book.sure[part] < book.sure[whole]


def test_pinned_recompute_is_forced_whatever_the_memory() -> None:
    request = Request(cluster=CLUSTER, recompute="full")
    solver = CandidateSolver(FOLDED, request)
    candidate = Candidate(cluster=CLUSTER, stages=2, mesh=meshes(CLUSTER, 2)[0], micro_batches=4)
    forced = solver.bounds.forced(candidate)
    assert forced == pytest.approx(solver.bounds.recompute.seconds("full") / 2)
    free = CandidateSolver(FOLDED, Request(cluster=CLUSTER)).bounds
    assert solver.bounds.least_waiting(candidate) > free.least_waiting(candidate) + 0.4 * forced
