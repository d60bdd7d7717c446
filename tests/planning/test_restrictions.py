"""What a restriction makes the search look at is looked at without it, too: small models, of which tables tell least."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.errors import NoPlanFits
from autopar.planning.planner import folded_of, search_plan
from autopar.planning.program_search import ProgramSearch
from autopar.planning.request import Request
from autopar.planning.variations import variations
from autopar.planning.walk import Walk
from benchmarks.truths import KINDS, SLOWER, drawn, drawn_widely

TINY = Shape(layers=2, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=1024, sequence=128, dropout=False)


def walked(preset: str, devices: int, **asked: Any) -> Walk:
    """The walk for a model that mostly launches."""
    graph = transformer(TINY, batch=16).graph
    request = Request(cluster=load_cluster(preset).sized(devices), memory=1e15, **asked)
    walk = Walk(folded_of(graph, request), request)
    walk.run()
    return walk


def test_what_the_walk_has_priced_as_a_program_stays_one() -> None:
    """The whole graph solved anew may be better by the tables and yet slower."""
    walk = walked("rtx4090", 4)
    programs = ProgramSearch(walk).programs
    exact = [solved for solved in walk.ranking.solved if solved.exact][:4]
    assert exact and all(programs.best(solved).seconds <= 1.001 * solved.seconds for solved in exact)


def test_other_solutions_of_a_candidate_are_looked_at_where_the_bound_leaves_room() -> None:
    walk = walked("rtx4090", 8, stages=2, micro_batches=1)
    assert walk.ranking.solved[0].seconds > 1.05 * walk.ranking.bound
    known = max((s for s in walk.ranking.solved if s.free and s.exact), key=lambda s: s.seconds)
    found = list(variations(walk.solver, known))
    assert all(other.exact and other.candidate == known.candidate and other.mode == known.mode for other in found)
    assert len({other.solution.choices for other in found} | {known.solution.choices}) == len(found) + 1


@pytest.mark.parametrize(
    ("seed", "pins"),
    [
        pytest.param(8, {"stages": 2}, id="tables put the pipeline far behind what it is"),
        pytest.param(13, {"stages": 2}, id="less is hidden than the tables take for hidden"),
    ],
)
def test_no_pin_is_faster(seed: int, pins: dict[str, Any]) -> None:
    graph, free = drawn_widely(seed)
    assert search_plan(graph, free).predicted.step <= SLOWER * search_plan(graph, replace(free, **pins)).predicted.step


@pytest.mark.parametrize(
    ("seed", "asked"),
    [
        pytest.param(2201, {"zero": 0}, id="parameters stored whole, not at the place of the best"),
        pytest.param(5070, {"share": 1.1}, id="a limit that does not bind the plan leads to a thriftier solution", marks=pytest.mark.slow),
        pytest.param(2084, {"zero": 0}, id="a thriftier one of stages with parameters whole", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param(2174, {"share": 0.9}, id="another mesh with parameters whole", marks=[pytest.mark.slow, pytest.mark.ci]),
    ],
)
def test_what_a_restriction_finds_is_found_without_it(seed: int, asked: dict[str, Any]) -> None:
    graph, free = drawn(seed)
    best = search_plan(graph, free).predicted
    pins = {name: value for name, value in asked.items() if name != "share"}
    less = replace(free, **pins, memory=asked.get("share", 1e9) * best.memory)
    assert best.step <= SLOWER * search_plan(graph, less).predicted.step


def test_less_memory_is_not_faster() -> None:
    graph = transformer(TINY, batch=16).graph
    request = Request(cluster=load_cluster("rtx4090").sized(8), memory=1e15, stages=2, micro_batches=1)
    free = search_plan(graph, request).predicted
    assert free.step <= SLOWER * search_plan(graph, replace(request, memory=0.6 * free.memory)).predicted.step


def test_stages_that_are_full_one_by_one_are_tried_in_all_modes() -> None:
    """All stages together have room without recomputing, and the first has not."""
    graph, free = drawn_widely(18)
    request = replace(free, stages=4, micro_batches=1)
    request = replace(request, memory=0.9 * search_plan(graph, request).predicted.memory)
    best, again = (search_plan(graph, one).predicted.step for one in (request, replace(request, recompute="selective")))
    assert best <= SLOWER * again


def test_a_chain_of_restrictions() -> None:
    outcome = KINDS["chains"](8)
    assert outcome.asked and not outcome.wrong


def test_a_pinned_schedule_of_several_chunks_names_the_memory_that_would_do() -> None:
    graph, cluster = transformer(TINY, batch=16).graph, load_cluster("dgx-h100").sized(2)
    request = Request(cluster=cluster, memory=1e6, stages=2, micro_batches=4, pipeline="interleaved", interleave=2)
    with pytest.raises(NoPlanFits) as caught:
        search_plan(graph, request)
    assert 1e6 < caught.value.minimum < math.inf
