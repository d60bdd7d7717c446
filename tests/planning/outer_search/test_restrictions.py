"""Candidates that the search sees under a restriction are seen without it, too: small models, whose
tables tell least.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.errors import NoPlanFits
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from benchmarks.truths import KINDS, SLOWER, drawn, drawn_widely

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


def test_less_memory_is_not_faster() -> None:
    graph = transformer(TINY, batch=16).graph
    request = Request(
        cluster=load_cluster("rtx4090").sized(8), memory=1e15, stages=2, micro_batches=1
    )
    free = search_plan(graph, request).predicted
    assert (
        free.step
        <= SLOWER * search_plan(graph, replace(request, memory=0.6 * free.memory)).predicted.step
    )


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
