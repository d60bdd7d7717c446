"""Recompute that memory forces: never more than what tables and programs have."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.order.schedules import SCHEDULES, PipelineSchedule, in_flight
from autopar.planning.bounds.forced_recompute import ForcedRecompute, shares_in_flight
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.book import Book
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.outer_search.evaluator import Evaluator
from autopar.planning.outer_search.whole_programs import WholePrograms
from autopar.planning.space.candidates import Candidate, meshes
from autopar.planning.space.groups import CandidateGroups
from autopar.planning.space.modes import Mode
from autopar.planning.stages.parts import Terms
from autopar.search import solve
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

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
    assert {"none", "full"} <= set(recompute.recomputes)
    for kind in recompute.recomputes:
        case = solver.case(candidate, Mode(zero=3, recompute=kind))
        share = recompute._of(kind).saved / count / mesh.devices
        assert 0.9 * share <= solver.least_saved(case) <= 4 * share or count > 4
        assert solver.least_saved(case) >= share * (1 - 1e-9)
        tables = solver.tables(case)
        memory = zip(tables.variables, tables.graph.memory or (), strict=True)
        saved = [float(of.min()) for variable, of in memory if variable.what == "operator"]
        assert solver.least_saved(case) == math.fsum(saved)


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


@pytest.mark.parametrize("row", SCHEDULES.values(), ids=lambda row: row.name)
def test_later_stages_have_no_more_in_flight(row: PipelineSchedule) -> None:
    for stages, count, chunks in itertools.product(
        (2, 3, 7, 16), (1, 2, 4, 7, 16, 48), row.chunks or (1,)
    ):
        if row.refusal(stages, count, chunks):
            continue
        held = [in_flight(row.name, stage, stages, count, chunks) for stage in range(stages)]
        assert sorted(held, reverse=True) == held
        every, least = shares_in_flight(row.name, chunks, stages, count)
        exact = math.fsum(1 / one for one in held)
        assert exact <= every * (1 + 1e-12) and every < 1.3 * exact and least == 1 / held[0]


def test_no_cut_within_the_memory_saves_more_than_there_is_room_for() -> None:
    """Drawn cuts into chunks of any size, with the bytes that a plan states of them."""
    candidate = Candidate(cluster=CLUSTER, stages=4, mesh=meshes(CLUSTER, 4)[0], micro_batches=8)
    solver = solver_within(None)
    terms = Terms(
        request=solver.request,
        schedule=solver.schedule_of(candidate, Mode(zero=1, recompute="none"), short=False),
        always=0.0,
    )
    tables = WholePrograms(Evaluator(solver)).tables(candidate, Mode(zero=1, recompute="none"))
    cutter, pairs = terms.cutter([terms.part(solver.group(candidate), tables, solve(tables.graph))])
    rng = np.random.default_rng(0)
    least = math.inf
    for (name, chunks), _ in itertools.product(pairs, range(20)):
        flying = [in_flight(name, stage, 4, 8, chunks) for stage in range(4)]
        inner = np.sort(rng.choice(np.arange(1, cutter.costs.count), 4 * chunks - 1, False))
        ends = [0, *inner.tolist(), cutter.costs.count]
        held = [0.0] * 4
        for number, (i, j) in enumerate(itertools.pairwise(ends)):
            held[number % 4] += cutter.costs.stage(number % 4, i, j, flying[number % 4]).memory
        least = min(least, max(held))
        request = Request(cluster=CLUSTER, memory=max(held))
        tight = ForcedRecompute(FOLDED, request)
        assert tight.fits(candidate, "none", [(name, chunks)])
    # It is no bound of nothing.
    few = Request(cluster=CLUSTER, memory=0.2 * least)
    assert not ForcedRecompute(FOLDED, few).fits(candidate, "none", pairs)


def test_pinned_recompute_is_forced_whatever_the_memory() -> None:
    request = Request(cluster=CLUSTER, recompute="full")
    solver = CandidateSolver(FOLDED, request)
    candidate = Candidate(cluster=CLUSTER, stages=2, mesh=meshes(CLUSTER, 2)[0], micro_batches=4)
    forced = solver.bounds.forced(candidate)
    assert forced == pytest.approx(solver.bounds.recompute.seconds("full") / 2)
    free = CandidateSolver(FOLDED, Request(cluster=CLUSTER)).bounds
    assert solver.bounds.least_waiting(candidate) > free.least_waiting(candidate) + 0.4 * forced
