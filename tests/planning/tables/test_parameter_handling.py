"""The tables of a candidate promise nearly what its program takes: their sum is near it, and
candidates are ranked by the program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.order.scheduled import Mode
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.best_first import BestFirst
from autopar.planning.outer_search.whole_programs import WholePrograms
from autopar.planning.programs.priced_program import PricedProgram, evaluate
from autopar.planning.space.multiplicities import Multiplicities
from autopar.planning.tables.build import build_tables
from autopar.planning.tables.parameters.traffic import exposed_seconds
from autopar.schemes.pinning import stage_mesh
from autopar.search import solve
from autopar.sharding.analysis import analyse
from autopar.sharding.schedule import Types
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

WIDE = Shape(
    layers=4, hidden=2048, heads=16, kv_heads=16, ffn=8192, vocab=8192, sequence=1024, dropout=False
)
SMALL = Shape(
    layers=4, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=8192, sequence=256, dropout=False
)
CLUSTER = load_cluster("dgx-h100").sized(8)
MASTER = Types(master="float32", reduce="float32")
ROWS: list[tuple[Shape, tuple[int, ...], float, dict[str, Any]]] = [
    (WIDE, (8,), 0.01, {"zero": 1, "micro_batches": 1}),
    (WIDE, (8,), 0.01, {"zero": 3, "micro_batches": 1}),
    (WIDE, (8,), 0.01, {"zero": 2, "micro_batches": 2}),
    (WIDE, (8,), 0.01, {"zero": 3, "micro_batches": 4}),
    (WIDE, (8,), 0.02, {"zero": 1, "micro_batches": 1, "types": MASTER}),
    (WIDE, (8,), 0.02, {"zero": 3, "micro_batches": 1, "types": MASTER}),
    (WIDE, (8,), 0.02, {"zero": 2, "micro_batches": 2, "types": MASTER}),
    (WIDE, (2, 4), 0.01, {"zero": 1, "micro_batches": 1}),
    (SMALL, (8,), 0.02, {"zero": 1, "micro_batches": 1}),
    (SMALL, (2, 4), 0.02, {"zero": 1, "micro_batches": 2}),
]
"""A model, a mesh, what the tables' sum may be off, and what is fixed."""


@pytest.mark.parametrize(("shape", "sizes", "tolerance", "fixed"), ROWS)
def test_the_tables_add_up_to_the_program(
    shape: Shape, sizes: tuple[int, ...], tolerance: float, fixed: dict[str, Any]
) -> None:
    """The difference that is left between the two, units of few parameters and the overlap of
    tasks, is in no candidate's rank: it is played.
    """
    request = Request(
        cluster=CLUSTER, fewer=False, stages=1, mesh=stage_mesh(CLUSTER, sizes), **fixed
    )
    search = BestFirst(FoldedModel(transformer(shape, batch=32).graph, train=True), request)
    search.run()
    best = search.incumbents.played[0]
    solved = best.solved
    work = search.solver.work(solved.candidate, solved.mode, search.folded.counts, short=True)
    summed = solved.solution.cost + exposed_seconds(
        solved.tables, solved.solution, replace(work, hidden=solved.hidden)
    )
    assert summed == pytest.approx(best.seconds, rel=tolerance)
    assert search.incumbents.programs[0].seconds == pytest.approx(best.seconds, rel=1e-9)


def test_a_folded_solution_has_the_step_of_the_whole_graph() -> None:
    """Every operator and tensor takes what was chosen for the one that stands for it: against the
    whole graph's own solution.
    """
    request = Request(
        cluster=CLUSTER,
        fewer=False,
        stages=1,
        mesh=stage_mesh(CLUSTER, (2, 4)),
        zero=1,
        micro_batches=2,
    )
    search = BestFirst(FoldedModel(transformer(WIDE, batch=32).graph, train=True), request)
    search.run()
    best = search.incumbents.played[0]
    programs = WholePrograms(search.evaluator)
    solved = best.solved
    tables = programs.tables(solved.candidate, solved.mode, solved.hidden)
    assert len(tables.variables) > len(solved.tables.variables)
    schedule = programs.schedule(solved.candidate, solved.mode)
    whole = evaluate(tables, solve(tables.graph), schedule)
    assert whole.seconds == pytest.approx(best.seconds, rel=1e-9)


def test_reductions_of_shards_are_not_waited_for_behind_sums() -> None:
    """ZeRO 3 has two kinds of units, which go side by side."""
    request = Request(
        cluster=CLUSTER,
        fewer=False,
        stages=1,
        mesh=stage_mesh(CLUSTER, (8,)),
        zero=3,
        micro_batches=1,
    )
    search = BestFirst(FoldedModel(transformer(WIDE, batch=32).graph, train=True), request)
    search.run()
    actual = search.incumbents.programs[0]
    assert isinstance(actual, PricedProgram)
    modes = {unit.mode for unit in actual.plan.units}
    assert (
        modes == {Mode.ONCE, Mode.PER_PASS}
        and actual.estimate.overlapped > 0.75 * actual.estimate.communication
    )
    order = [unit for need in actual.plan.needs() for unit in need.reduced]
    assert sorted(order) == list(range(len(actual.plan.units)))


@pytest.mark.parametrize(("devices", "equal"), [(1, True), (2, False)])
def test_one_device_has_no_copies_of_parameters(devices: int, equal: bool) -> None:
    """Where several devices add up gradients in whole copies, there is one for each gathered
    parameter; one device gathers none.
    """
    analysis = analyse(transformer(SMALL, batch=8).graph, train=True)
    cluster = CLUSTER.sized(devices)
    prices = MeshPrices(cluster=cluster, mesh=stage_mesh(cluster, (devices,)))
    works = (Multiplicities(passes=2.0, accumulating=True, zero=zero) for zero in (1, 2))
    whole, shards = (
        build_tables(analysis, prices, optimizer="adamw", work=work).graph for work in works
    )
    choices = (0,) * len(whole.sizes)
    assert (whole.memory_of(choices) == shards.memory_of(choices)) == equal
