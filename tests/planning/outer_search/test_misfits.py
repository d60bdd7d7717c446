"""Requests that surely do not fit have no plan, and no request that has one is taken for such."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import NoPlanFits
from autopar.planning.outer_search import surely_misfits
from autopar.planning.planner import folded_of, search_plan
from autopar.schemes import scheme_named
from autopar.schemes.pinning import pinned
from autopar.sharding.analysis import analyse
from benchmarks.truths import drawn


@pytest.mark.parametrize("name", ["data", "megatron", "zero3"])
def test_what_surely_does_not_fit_has_no_plan(name: str) -> None:
    graph, free = drawn(3)
    free = replace(free, offload="none", uniform=True, gap=None, memory=None)
    request = pinned(free, scheme_named(name), analyse(graph, train=free.train))
    best = search_plan(graph, request)
    folded = folded_of(graph, request)
    # Just enough for the plan, so that some plan fits.
    assert not surely_misfits(folded, replace(request, memory=best.predicted.memory))
    too_little = replace(request, memory=best.predicted.memory_parts["optimizer"] / 4)
    assert surely_misfits(folded, too_little)
    with pytest.raises(NoPlanFits):
        search_plan(graph, too_little)
    # State that may be in host memory, and devices that may be idle, leave it open.
    assert not surely_misfits(folded, replace(too_little, offload=None))
    assert not surely_misfits(folded, replace(too_little, fewer=True))
