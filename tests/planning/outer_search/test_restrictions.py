"""Candidates that the search sees under a restriction are seen without it, too: small models, whose
tables tell least.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.errors import NoPlanFits
from autopar.ir import Graph
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.planning.solve.within_limits import solve_within
from autopar.planning.space.candidates import meshes
from autopar.planning.stages import staged_program
from autopar.planning.stages.staged_program import StagedProgram, thriftier_pipeline
from autopar.search import Solution
from benchmarks.ablated.cases import CASES_BY_NAME
from benchmarks.planned.cases import graph_of, request_of
from benchmarks.restricted.cases import CASES_BY_NAME as RESTRICTED
from benchmarks.restrictions import FASTER, looked_at
from benchmarks.truths import KINDS, SLOWER, drawn, drawn_widely
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

TINY = Shape(
    layers=2, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=1024, sequence=128, dropout=False
)


@pytest.mark.parametrize(
    ("seed", "pins"),
    [
        pytest.param(8, {"stages": 2}, id="tables put the pipeline far behind what it is"),
        pytest.param(13, {"stages": 2}, id="less is hidden than the tables take for hidden"),
    ],
)
def test_no_pin_is_faster(seed: int, pins: dict[str, Any]) -> None:
    graph, free = drawn_widely(seed)
    assert (
        search_plan(graph, free).predicted.step
        <= SLOWER * search_plan(graph, replace(free, **pins)).predicted.step
    )


@pytest.mark.parametrize(
    ("seed", "asked"),
    [
        pytest.param(2201, {"zero": 0}, id="parameters stored whole, not at the place of the best"),
        pytest.param(
            5070,
            {"share": 1.1},
            id="a limit that does not bind the plan leads to a thriftier solution",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2084,
            {"zero": 0},
            id="a thriftier one of stages with parameters whole",
            marks=[pytest.mark.slow, pytest.mark.ci],
        ),
        pytest.param(
            2174,
            {"share": 0.9},
            id="another mesh with parameters whole",
            marks=[pytest.mark.slow, pytest.mark.ci],
        ),
    ],
)
def test_what_a_restriction_finds_is_found_without_it(seed: int, asked: dict[str, Any]) -> None:
    graph, free = drawn(seed)
    best = search_plan(graph, free).predicted
    pins = {name: value for name, value in asked.items() if name != "share"}
    less = replace(free, **pins, memory=asked.get("share", 1e9) * best.memory)
    assert best.step <= SLOWER * search_plan(graph, less).predicted.step


def scarce() -> tuple[Graph, Request]:
    """A model of which state in host memory makes room for a schedule that waits less than 1F1B."""
    shape = replace(TINY, layers=8, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000)
    graph = transformer(replace(shape, sequence=2048), batch=32).graph
    return graph, Request(
        cluster=load_cluster("dgx-h100").sized(4),
        stages=4,
        micro_batches=8,
        recompute="none",
        memory=1.28e10,
    )


def test_a_faster_schedule_that_lacks_memory_gets_thriftier_strategies() -> None:
    graph, free = scarce()
    plain = search_plan(graph, replace(free, schedule="1f1b"))
    assert plain.predicted.host_memory == 0
    best = search_plan(graph, free)
    assert best.predicted.host_memory > 0
    assert best.predicted.step < 0.97 * plain.predicted.step


def test_thriftier_strategies_are_solved_closely_only_as_far_as_they_may_be_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def recorded(*args: Any, **named: Any) -> StagedProgram | None:
        asked.append((args, named))
        return thriftier_pipeline(*args, **named)

    monkeypatch.setattr(staged_program, "thriftier_pipeline", recorded)
    search_plan(*scarce())
    parts, terms, schedules = asked[0][0]
    best = thriftier_pipeline(parts, terms, schedules, too_slow=math.inf)
    assert best is not None
    closest: list[float] = []

    def solved(*args: Any, enough: float) -> Solution:
        closest.append(enough)
        return solve_within(*args, enough=enough)

    monkeypatch.setattr(staged_program, "solve_within", solved)
    step = best.pipeline.step
    just = thriftier_pipeline(parts, terms, schedules, too_slow=1.001 * step)
    assert just is not None and just.pipeline.step <= step
    assert set(closest) == {1.001 * step * 4}
    assert thriftier_pipeline(parts, terms, schedules, too_slow=step) is None


def test_less_memory_is_not_faster() -> None:
    graph = transformer(TINY, batch=16).graph
    request = Request(
        cluster=load_cluster("rtx4090").sized(8), memory=1e15, stages=2, micro_batches=1
    )
    free = search_plan(graph, request).predicted
    less = search_plan(graph, replace(request, memory=0.6 * free.memory)).predicted
    # Of one micro-batch in two stages, the cut that fits first is 3.5 % behind.
    assert free.step <= 1.04 * less.step


def test_stages_that_are_full_one_by_one_are_tried_in_all_modes() -> None:
    """All stages together have room without recomputing, and the first has not."""
    graph, free = drawn_widely(18)
    request = replace(free, stages=4, micro_batches=1)
    request = replace(request, memory=0.9 * search_plan(graph, request).predicted.memory)
    best, again = (
        search_plan(graph, one).predicted.step
        for one in (request, replace(request, recompute="selective"))
    )
    assert best <= SLOWER * again


@pytest.mark.parametrize("name", ["llama-8b-4", pytest.param("hybrid-4", marks=pytest.mark.slow)])
def test_no_subset_of_restrictions_is_faster_than_a_smaller_one(name: str) -> None:
    compared = looked_at(RESTRICTED[name], range(1)).pairs
    assert len(compared) > 8
    assert [str(pair) for pair in compared if pair.gained > FASTER] == []


@pytest.mark.parametrize(
    ("name", "fewer", "more"),
    [
        pytest.param(
            "gpt2-2-16-tight",
            {"mesh": 1, "stages": 1},
            {"zero": 2, "micro_batches": 2},
            id="programs take less than their tables promise",
        ),
        pytest.param(
            "mixtral-8x7b-1-2", {}, {"zero": 2, "micro_batches": 1}, id="ZeRO 2, one micro-batch"
        ),
        pytest.param(
            "mixtral-8x7b-2-64-tight",
            {"zero": 3, "recompute": "none"},
            {"micro_batches": 16},
            id="the mesh of the second fastest is worth being split",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama3-405b-2-512-tight",
            {},
            {"stages": 2, "schedule": "zero_bubble"},
            id="the mesh of the fastest pipeline is worth being split",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_search_with_fewer_restrictions_finds_as_much(
    name: str, fewer: dict[str, Any], more: dict[str, Any]
) -> None:
    case = CASES_BY_NAME[name]
    graph = graph_of(case, Path())
    request = request_of(case, graph)
    if "mesh" in fewer:
        fewer = fewer | {"mesh": meshes(request.cluster)[fewer["mesh"]]}
    less = replace(request, **fewer)
    step, restricted = (
        search_plan(graph, one).predicted.step for one in (less, replace(less, **more))
    )
    assert step <= (1 + FASTER) * restricted


@pytest.mark.parametrize(
    ("name", "fewer", "shape", "more"),
    [
        pytest.param(
            "gpt2-8", {}, None, {"zero": 2}, id="a mode that only stores otherwise has a margin"
        ),
        pytest.param(
            "gpt2-12",
            {"stages": 2},
            None,
            {"micro_batches": 3},
            id="stages of unequal groups in another number of micro-batches",
        ),
        pytest.param(
            "gpt2-8-tight",
            {},
            None,
            {"micro_batches": 4},
            id="a pipeline is 6 percent faster at another hidden share",
        ),
        pytest.param(
            "llama-8b-16",
            {"stages": 2, "micro_batches": 4, "zero": 1},
            (2, 2, 2),
            {},
            id="meshes are compared where both hide as much",
        ),
    ],
)
def test_what_one_restriction_more_finds(
    name: str, fewer: dict[str, Any], shape: tuple[int, ...] | None, more: dict[str, Any]
) -> None:
    case = RESTRICTED[name]
    graph = case.graph
    free = replace(case.request(graph), **fewer)
    pinned = replace(free, **more)
    if shape is not None:
        every = meshes(free.cluster, fewer["stages"])
        pinned = replace(pinned, mesh=next(one for one in every if one.shape == shape))
    step, restricted = (search_plan(graph, one).predicted.step for one in (free, pinned))
    assert step <= (1 + FASTER) * restricted


def test_a_chain_of_restrictions() -> None:
    outcome = KINDS["chains"](8)
    assert outcome.asked and not outcome.wrong


def test_a_pinned_schedule_of_several_chunks_names_the_memory_that_would_do() -> None:
    graph = transformer(TINY, batch=16).graph
    cluster = load_cluster("dgx-h100").sized(2)
    request = Request(
        cluster=cluster, memory=1e6, stages=2, micro_batches=4, schedule="interleaved", interleave=2
    )
    with pytest.raises(NoPlanFits) as caught:
        search_plan(graph, request)
    assert 1e6 < caught.value.minimum < math.inf
