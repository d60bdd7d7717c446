"""Parameters that the first operators read: nothing is left for their way to run under, so that the
tables count all of it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import load_cluster
from autopar.planning.bounds.by_mesh import Bounds
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.best_first import BestFirst
from autopar.planning.planner import search_plan
from autopar.planning.tables.alone import tables_alone
from autopar.planning.tables.parameters.first_read import SHARE, Reading
from autopar.schemes.pinning import stage_mesh
from autopar.search import solve
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SHAPE = Shape(
    layers=2, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=32768, sequence=256, dropout=False
)
CLUSTER = load_cluster("dgx-h100").sized(8)


def _reading(folded: FoldedModel) -> Reading:
    tables, _ = tables_alone(folded.analysis(short=True), CLUSTER, folded.counts)
    return Reading(tables, solve(tables.graph))


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_the_embedding_is_read_first(sizes: tuple[int, ...]) -> None:
    """On one axis all that is read at the very beginning is early, on several the largest; nothing
    but rounding comes before it.
    """
    folded = FoldedModel(transformer(SHAPE, batch=8).graph, train=True)
    reading = _reading(folded)
    actual = reading.on(stage_mesh(CLUSTER, sizes))
    first = {name for name, (_, before) in reading.early.items() if before == 0.0}
    assert "embed.weight" in actual.readers and actual.readers["embed.weight"] in {
        op.name for op in folded.graph.operators[:2]
    }
    assert first >= {*actual.readers} if len(sizes) > 1 else first <= {*actual.readers}
    assert len(actual.readers) == 1 or len(sizes) == 1
    tables, _ = tables_alone(folded.analysis(short=True), CLUSTER, folded.counts)
    assert actual.before <= SHARE * solve(tables.graph).cost / 8


def test_stages_have_none_and_neither_has_an_inference() -> None:
    mesh = stage_mesh(CLUSTER, (4,), 2)
    graph = transformer(SHAPE, batch=8).graph
    assert (
        not Bounds(FoldedModel(graph, train=True), Request(cluster=CLUSTER)).early(2, mesh).readers
    )
    assert (
        not Bounds(FoldedModel(graph, train=False), Request(cluster=CLUSTER, train=False))
        .early(1, mesh)
        .readers
    )


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_a_large_embedding_is_priced_as_it_is_played(sizes: tuple[int, ...]) -> None:
    """The embedding is most of this model's bytes: were its way taken to be hidden, the tables
    would promise much less than the program.
    """
    request = Request(
        cluster=CLUSTER, fewer=False, stages=1, micro_batches=1, mesh=stage_mesh(CLUSTER, sizes)
    )
    search = BestFirst(FoldedModel(transformer(SHAPE, batch=8).graph, train=True), request)
    search.run()
    best = search.incumbents.played[0]
    assert search.bound <= best.seconds <= 1.1 * best.solved.seconds


def test_fewer_ranks_of_one_host_have_its_memory() -> None:
    """One rank has all of a host's memory, of which eight have an eighth each: more ranks never
    make the plan slower.
    """
    local = load_cluster("local-cpu")
    folded = FoldedModel(transformer(SHAPE, batch=8).graph, train=True)
    alone = search_plan(folded.graph, Request(cluster=local.sized(1)))
    scale = 3 * alone.predicted.memory / local.sized(1).device.memory_capacity
    small = replace(
        local,
        device=replace(
            local.device, memory_capacity=scale * local.device.memory_capacity, reserved=0.0
        ),
    )
    assert (
        small.sized(8).device.usable_memory
        < alone.predicted.memory
        < small.sized(1).device.usable_memory
    )
    steps = [
        search_plan(folded.graph, Request(cluster=small.sized(ranks))).predicted.step
        for ranks in (1, 8)
    ]
    assert steps[1] <= steps[0] * (1 + 1e-9)


def test_all_devices_may_do_all_alike_on_three_axes() -> None:
    """A model that is too small to split takes no longer on a mesh of three axes than on one
    device.
    """
    tiny = replace(SHAPE, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=64, sequence=16)
    graph = transformer(tiny, batch=8).graph
    alone = search_plan(graph, Request(cluster=CLUSTER.sized(1))).predicted.step
    split = search_plan(
        graph, Request(cluster=CLUSTER, mesh=stage_mesh(CLUSTER, (2, 2, 2)))
    ).predicted.step
    assert split <= alone * (1 + 1e-9)
