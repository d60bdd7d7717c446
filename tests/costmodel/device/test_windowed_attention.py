"""Attention with sinks is priced as attention, and behind a window by the keys that it sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.costmodel import load_cluster
from autopar.costmodel.device.operator_seconds import operator_parts
from autopar.ir.recipes import ATTENTION, WINDOWED
from autopar.runtime.proof import sample, strategies
from autopar.sharding.rules import Call

LENGTH = 2048


def seconds(kind: str, cluster: str, **given: Any) -> tuple[float, float]:
    """Forward and backward seconds on one of two devices that repeat each other."""
    case = sample(kind, is_causal=True, **given)
    call = Call.of(case.graph, case.operator)
    table = strategies(case, (2,))
    gradients = frozenset(t.name for t in call.outputs)
    parts = operator_parts(call, table, (2,), load_cluster(cluster), gradients)
    whole = [" ".join(table.names(i)) for i in range(len(table.choices))].index("R")
    return float(parts.forward[whole]), float(parts.backward[whole])


@pytest.mark.parametrize("cluster", ["dgx-h100", "local-cpu"])
def test_sinks_cost_next_to_nothing_and_windows_save_what_they_hide(cluster: str) -> None:
    queries = torch.zeros(2, 8, LENGTH, 64, dtype=torch.bfloat16)
    keys = queries[:, :2]
    tensors = {"query": queries, "key": keys, "value": keys}
    plain = seconds(ATTENTION, cluster, **tensors, enable_gqa=True)
    sunk = seconds(WINDOWED, cluster, **tensors, sinks=torch.zeros(8))
    assert sunk == pytest.approx(plain, rel=0.02)
    behind = seconds(WINDOWED, cluster, **tensors, sinks=torch.zeros(8), window=128)
    assert all(one < 0.6 * other for one, other in zip(behind, sunk, strict=True))
