"""The estimate of a pipeline against its cuts, and its parts against tables built anew."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.ir import Graph
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.best_first import BestFirst
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.outer_search.evaluator import Evaluator
from autopar.planning.planner import search_plan
from autopar.planning.space.candidates import Candidate, meshes
from autopar.planning.space.modes import Mode
from autopar.planning.stages.estimate import Pipe, pass_seconds, saved_bytes
from autopar.planning.stages.parts import Terms
from autopar.planning.stages.whole_model import expand
from autopar.planning.tables.build import build_tables
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

CLUSTER = load_cluster("dgx-h100").sized(8)


def graph_of(layers: int = 8, batch: int = 32, **more: Any) -> Graph:
    shape = {
        "hidden": 1024,
        "heads": 8,
        "kv_heads": 8,
        "ffn": 4096,
        "vocab": 1024,
        "sequence": 1024,
        "dropout": False,
    }
    return transformer(Shape(layers=layers, **{**shape, **more}), batch=batch).graph


def test_bubbles_are_those_of_the_papers() -> None:
    pipe = Pipe(stages=8, micro_batches=32, weight=1 / 3)
    assert pipe.bubble("1f1b") == pipe.bubble("gpipe") == 7
    assert pipe.bubble("interleaved", 4) == 7 / 4 and pipe.bubble("zero_bubble") == pytest.approx(
        7 / 3
    )
    assert pipe.least_bubble(
        (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1))
    ) == pytest.approx(7 / 3)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("zero", "tolerance"), [(1, 1e-6), (3, 0.1)])
def test_seconds_and_bytes_are_linear_in_passes_and_micro_batches_in_flight(
    zero: int, tolerance: float, recompute: str
) -> None:
    """One more pass costs X, one more micro-batch in flight keeps as many bytes again; under ZeRO-3
    the buckets are counted to X.
    """
    solver = CandidateSolver(FoldedModel(graph_of(), train=True), Request(cluster=CLUSTER))
    mesh = meshes(CLUSTER, 2)[0]
    candidate = Candidate(cluster=CLUSTER, stages=2, mesh=mesh, micro_batches=8)
    mode = Mode(zero=zero, recompute=recompute)
    solved = Evaluator(solver).promise(solver.case(candidate, mode))
    assert solved is not None
    work = solver.work(candidate, mode, solver.folded.counts, short=True)
    solution = solved.solution
    tables = solved.tables
    more = replace(work, passes=work.passes + 1, in_flight=work.in_flight + 1)
    other = build_tables(tables.analysis, tables.prices, optimizer="adamw", work=more).graph
    assert other.cost(solution.choices) - solution.cost == pytest.approx(
        pass_seconds(tables, solution, work), rel=tolerance
    )
    assert other.memory_of(solution.choices) - solution.memory == pytest.approx(
        saved_bytes(tables, solution, work), rel=1e-9
    )


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_stage_keeps_what_its_tables_count(recompute: str) -> None:
    """A value that a product reads gathered is kept gathered, too: with fewer samples than devices,
    layers are split over the devices of a stage.
    """
    solver = CandidateSolver(FoldedModel(graph_of(batch=4), train=True), Request(cluster=CLUSTER))
    candidate = Candidate(cluster=CLUSTER, stages=2, mesh=meshes(CLUSTER, 2)[0], micro_batches=4)
    mode = Mode(zero=1, recompute=recompute)
    solved = Evaluator(solver).promise(solver.case(candidate, mode))
    assert solved is not None
    folded = solver.folded
    work = solver.work(candidate, mode, solver.folded.counts, short=True)
    schedule = solver.schedule(mode, 4, [solved.tables.prices], short=True)
    terms = Terms(
        request=solver.request,
        schedule=schedule,
        always=solver.always,
        expand=functools.partial(expand, folded),
    )
    figures = terms.part(solver.group(candidate), solved.tables, solved.solution).figures
    assert float(figures.saved.sum()) == pytest.approx(
        saved_bytes(solved.tables, solved.solution, work), rel=0.08
    )


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    "pins", [{"stages": 4}, {"stages": 2, "recompute": "full"}, {"stages": 4, "memory": 4.5e8}]
)
def test_cuts_on_the_folded_graph_are_those_on_the_whole_one(pins: dict[str, Any]) -> None:
    """A pipeline that is cut on the folded graph takes as long as its plan."""
    graph = graph_of(layers=12)
    request = Request(cluster=CLUSTER, **pins)
    search = BestFirst(FoldedModel(graph, train=True), request)
    search.run()
    best = search.incumbents.played[0].solved
    assert len(search.folded.folding.graph.operators) < len(graph.operators) / 3
    plan = search_plan(graph, request)
    assert plan.predicted.step <= search.incumbents.best * (1 + 1e-6)
    (folded, *_) = search.evaluator.play(best)
    pinned = search_plan(
        graph,
        replace(
            request,
            mesh=best.candidate.mesh,
            micro_batches=best.candidate.micro_batches,
            zero=best.mode.zero,
        ),
    )
    # The whole graph's last step, thriftier strategies that let in a schedule of less bubble, may
    # gain where memory is short.
    assert (
        (0.85 if "memory" in pins else 0.98) * folded.seconds
        <= pinned.predicted.step
        <= 1.02 * folded.seconds
    )
