"""Bounds of plans whose exchanges of experts hide, against merged programs of many strategies."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.analysis.searches.sensitivity import scaled_links
from autopar.costmodel import Cluster, load_cluster
from autopar.order.schedules import SCHEDULES
from autopar.planning.bounds.hidden_exchanges import HiddenExchanges
from autopar.planning.bounds.least_passes import NOTHING
from autopar.planning.bounds.proof import Proof
from autopar.planning.bounds.with_stages import PipelineBounds
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.best_first import BestFirst
from autopar.planning.outer_search.bound_within import loosest
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.outer_search.evaluator import Evaluator
from autopar.planning.outer_search.whole_programs import WholePrograms
from autopar.planning.programs.merged_passes import merged_forms
from autopar.planning.programs.priced_program import evaluate
from autopar.planning.space.candidates import Candidate, meshes
from autopar.planning.space.modes import Mode
from autopar.planning.stages.parts import Terms
from autopar.planning.tables import Tables
from autopar.search import solve
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

from .test_within import SMALL, programs, some


@functools.cache
def model(shared: int, layers: int = 2) -> FoldedModel:
    """Layers of eight experts, of which each token takes two, beside one that all tokens share."""
    shape = Shape(
        **{**SMALL, "layers": layers, "shared_ffn": shared}, experts=8, top_k=2, expert_ffn=512
    )
    return FoldedModel(transformer(shape, batch=16).graph, train=True)


def slow(devices: int) -> Cluster:
    """Devices whose exchanges take as long as much of the computation."""
    return scaled_links(load_cluster("dgx-h100").sized(devices), "nvlink", 0.1)


@pytest.mark.parametrize(("shared", "count"), [(2048, 1), (0, 4), (2048, 4)])
def test_no_program_undercuts_the_bound_of_its_hidden_exchanges(shared: int, count: int) -> None:
    folded = model(shared)
    cluster = slow(4)
    request = Request(cluster=cluster)
    plain = CandidateSolver(folded, request)
    hiding = CandidateSolver(folded, request, hiding=True)
    candidate = Candidate(cluster=cluster, stages=1, mesh=meshes(cluster)[0], micro_batches=count)
    assert hiding.bounds.exchanges.possible(candidate)
    sure = {candidate: 0.0}
    Proof(sure, hiding.bounds, hiding.room, hiding.modes()).raise_by(candidate)
    least = math.inf
    faster = 0
    for program, _ in programs(plain, folded, candidate, Mode(zero=1, recompute="none"), 0):
        forms = [program, *merged_forms([program], request)]
        faster += forms[-1].seconds < program.seconds
        least = min(least, forms[-1].seconds, program.seconds)
    assert 0.5 * least < sure[candidate] <= least * (1 + 1e-9)
    assert bool(faster) == (count > 1)


def travelling(tables: Tables) -> Tables:
    """Tables in which rows travel to experts, as anything else takes far too long."""
    unary = list(tables.graph.unary)
    for place, variable in enumerate(tables.variables):
        if variable.what == "operator" and variable.name.endswith(".experts"):
            degree = tables.strategies[variable.name].travel_degree(tables.prices.mesh.shape)
            unary[place] = np.where(degree[variable.rows] > 1, unary[place], 1e3)
    return replace(tables, graph=replace(tables.graph, unary=tuple(unary)))


@pytest.mark.parametrize("shared", [0, pytest.param(2048, marks=pytest.mark.slow)])
def test_no_merged_cut_undercuts_the_bound_of_its_hidden_exchanges(shared: int) -> None:
    folded = model(shared, layers=4)
    cluster = slow(8)
    request = Request(cluster=cluster, stages=2, interleave=1)
    plain = CandidateSolver(folded, request)
    hiding = PipelineBounds(CandidateSolver(folded, request, hiding=True).bounds)
    mode = Mode(zero=1, recompute="none")
    mesh = meshes(cluster, 2)[0]
    candidate = Candidate(cluster=cluster, stages=2, mesh=mesh, micro_batches=8)
    merged = [pair for pair in hiding.schedules(candidate) if SCHEDULES[pair[0]].merges]
    assert merged == list(hiding.schedules(candidate)) == [("merged_1f1b", 1)]
    bound = hiding.free(candidate, merged, "none")
    counted = PipelineBounds(plain.bounds).free(candidate, [("1f1b", 1)], "none")
    tables = WholePrograms(Evaluator(plain)).tables(candidate, mode)
    schedule = plain.schedule_of(candidate, mode, short=False)
    terms = Terms(request=request, schedule=schedule, always=plain.always)
    steps = []
    for choices in dict.fromkeys(some(travelling(tables), 0)):
        solution = replace(solve(tables.graph), choices=choices)
        cutter, _ = terms.cutter([terms.part(plain.group(candidate), tables, solution)])
        if (pipeline := cutter.cut("merged_1f1b", 1)) is not None:
            assert bound <= pipeline.step * (1 + 1e-9)
            steps.append((pipeline.step, any(stage.hidden for stage in pipeline.stages)))
    assert len(steps) >= 3 and all(hides for _, hides in steps)
    assert bound > 0.5 * min(step for step, _ in steps)
    assert bound < counted


@pytest.mark.parametrize(
    ("shared", "devices", "shape"),
    [(0, 4, (2, 2)), pytest.param(2048, 16, (2, 8), marks=pytest.mark.slow)],
)
def test_no_merged_program_undercuts_the_bound_of_its_own_choices(
    shared: int, devices: int, shape: tuple[int, ...]
) -> None:
    folded = FoldedModel(model(shared).folding.graph, train=True, folded=False)
    cluster = slow(devices)
    request = Request(cluster=cluster)
    plain = CandidateSolver(folded, request)
    hiding = CandidateSolver(folded, request, hiding=True)
    mesh = next(mesh for mesh in meshes(cluster) if mesh.shape == shape)
    candidate = Candidate(cluster=cluster, stages=1, mesh=mesh, micro_batches=4)
    mode = Mode(zero=1, recompute="none")
    tables = plain.tables(plain.case(candidate, mode))
    schedule = plain.schedule_of(candidate, mode, short=False)
    counted = loosest(plain, candidate, mode).graph
    bounded = loosest(hiding, candidate, mode).graph
    before = plain.bounds.early(1, mesh).before
    shares = []
    for choices in itertools.islice(dict.fromkeys(some(travelling(tables), 0)), 8):
        program = evaluate(tables, replace(solve(tables.graph), choices=choices), schedule)
        for merged in merged_forms([program], request):
            assert bounded.cost(choices) - before <= merged.seconds * (1 + 1e-9)
            shares.append((bounded.cost(choices) - before) / merged.seconds)
            assert bounded.cost(choices) < counted.cost(choices)
    assert len(shares) >= 3 and max(shares) > 0.8


@pytest.mark.parametrize(
    ("shared", "devices", "shape"),
    [(0, 8, (4,)), pytest.param(2048, 32, (2, 8), marks=pytest.mark.slow)],
)
def test_no_pair_of_passes_undercuts_the_bound_of_its_own_choices(
    shared: int, devices: int, shape: tuple[int, ...]
) -> None:
    folded = FoldedModel(model(shared).folding.graph, train=True, folded=False)
    cluster = slow(devices)
    request = Request(cluster=cluster, schedule="merged_1f1b")
    plain = CandidateSolver(folded, request)
    mesh = next(mesh for mesh in meshes(cluster, 2) if mesh.shape == shape)
    candidate = Candidate(cluster=cluster, stages=2, mesh=mesh, micro_batches=4)
    counted, bounded = (
        pipelines.tables(candidate, pipelines.work(candidate, "none", 1.0, NOTHING))
        for pipelines in (
            PipelineBounds(CandidateSolver(folded, request, hiding=hiding).bounds)
            for hiding in (False, True)
        )
    )
    schedule = plain.schedule_of(candidate, Mode(zero=1, recompute="none"), short=False)
    terms = Terms(request=request, schedule=schedule, always=plain.always)
    solution = solve(counted.graph)
    shares = []
    for choices in itertools.islice(dict.fromkeys(some(travelling(counted), 0)), 5):
        chosen = replace(solution, choices=choices)
        figures = terms.part(plain.group(candidate), counted, chosen).figures
        pair = float((figures.forward + figures.backward - figures.hidden).sum())
        assert figures.hidden.any()
        assert bounded.graph.cost(choices) <= pair * (1 + 1e-9)
        shares.append(bounded.graph.cost(choices) / pair)
    assert len(shares) >= 3 and max(shares) > 0.75


def test_exchanges_that_do_not_hide_count() -> None:
    folded = model(0)
    cluster = slow(4)
    hiding = CandidateSolver(folded, Request(cluster=cluster), hiding=True)
    two, eight = (
        Candidate(cluster=cluster, stages=1, mesh=meshes(cluster)[0], micro_batches=count)
        for count in (2, 8)
    )
    bounds = hiding.bounds
    # A bound of few micro-batches holds for more, of which one is a smaller part.
    assert bounds.proven(two, eight) <= min(bounds.proven(two), bounds.proven(eight))
    analysis = folded.analysis(short=True, micro_batches=2)
    work = hiding.work(two, Mode(zero=1, recompute="none"), folded.counts, short=True)
    alone, merged = (
        solve(travelling(bounds.tables(analysis, 4, 1, two.mesh, work, alone=alone)).graph).cost
        for alone in (True, False)
    )
    assert alone > 1.05 * merged


def test_both_kinds_of_plans_are_certified() -> None:
    folded = model(0)
    search = BestFirst(folded, Request(cluster=slow(2)))
    search.run()
    assert search.hiding.sure
    assert search.bound == min(search.book.least, search.hiding.least, search.incumbents.best)


def test_candidates_hide_what_is_asked_for() -> None:
    cluster = slow(4)
    candidates = [
        Candidate(
            cluster=cluster, stages=stages, mesh=meshes(cluster, stages)[0], micro_batches=count
        )
        for stages, count in ((1, 1), (1, 4), (2, 1), (2, 4))
    ]
    dense = FoldedModel(transformer(Shape(**SMALL), batch=16).graph, train=True)
    for folded, request, possible, certain in (
        # An expert that all tokens share is beside a layer, as no stages are.
        (model(2048), Request(cluster=cluster), "1101", "1100"),
        (model(2048), Request(cluster=cluster, overlap_experts=False), "1100", "1100"),
        (model(2048), Request(cluster=cluster, schedule="merged_1f1b"), "1101", "1111"),
        (model(0), Request(cluster=cluster), "0101", "0000"),
        (dense, Request(cluster=cluster), "0000", "0000"),
    ):
        exchanges = HiddenExchanges(folded, request)
        assert "".join(str(int(exchanges.possible(one))) for one in candidates) == possible
        assert "".join(str(int(exchanges.certain(one))) for one in candidates) == certain
