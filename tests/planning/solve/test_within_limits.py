"""The exact method follows the quick one only where that leaves a wide gap that matters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.planning.solve import within_limits
from autopar.search import CostGraph


@pytest.mark.parametrize(
    ("gap", "bound", "methods"),
    [
        pytest.param(0.5, 1.0, ["lagrangian", "exact"], id="wide gap"),
        pytest.param(0.005, 1.0, ["lagrangian"], id="small gap"),
        pytest.param(0.5, 2.0, ["lagrangian"], id="too slow in any case"),
    ],
)
def test_the_quick_method_is_enough_where_its_gap_is_small_or_its_bound_high(
    gap: float, bound: float, methods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = CostGraph(
        sizes=(2,) * 4,
        unary=(np.array([0.0, 1.0]),) * 4,
        edges={},
        memory=(np.array([8.0, 0.0]),) * 4,
    )
    tables: Any = SimpleNamespace(graph=graph, variables=(), host_of=lambda _: 0.0, host_room=0.0)
    asked: list[str] = []

    def solve(graph: CostGraph, *, method: str, memory_limit: float | None) -> Any:
        asked.append("exact" if method == within_limits.EXACT_METHOD else method)
        return SimpleNamespace(gap=gap, lower_bound=bound, choices=(0,) * 4)

    monkeypatch.setattr(within_limits, "solve", solve)
    monkeypatch.setattr("autopar.planning.solve.host_memory._require_room", lambda *_: None)
    within_limits.solve_within(tables, within_limits.EXACT_METHOD, 20.0, enough=2.0)
    assert asked == methods
