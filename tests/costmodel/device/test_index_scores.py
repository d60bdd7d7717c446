"""The scores of sparse attention are priced by their products, which every split shares out."""

from __future__ import annotations

import pytest
import torch

from autopar.costmodel import load_cluster
from autopar.costmodel.device.elementwise import memory_seconds
from autopar.costmodel.device.index_scores import PASSES
from autopar.costmodel.device.operator_seconds import operator_parts
from autopar.runtime.proof import sample, strategies
from autopar.sharding.rules import Call
from autopar.sharding.rules.contraction import INDEX_SCORES

B = 4
S = 512
H = 8
D = 64
T = 1024


@pytest.mark.parametrize("trained", [False, True])
def test_a_pass_is_its_products_and_what_passes_over_them(trained: bool) -> None:
    given = {"query": (B, S, H, D), "key": (B, T, D), "weights": (B, S, H)}
    tensors = {name: torch.randn(shape) for name, shape in given.items()}
    case = sample(INDEX_SCORES, **tensors, scale=0.5)
    call = Call.of(case.graph, case.operator)
    table = strategies(case, (2,))
    device = load_cluster("dgx-h100").device
    gradients = frozenset(t.name for t in call.outputs) if trained else frozenset()
    parts = operator_parts(call, table, (2,), load_cluster("dgx-h100"), gradients)
    names = {" ".join(table.names(i)): i for i in range(len(table.choices))}
    whole = float(parts.forward[names["R"]])
    passes = float(memory_seconds(PASSES * 4 * B * S * H * T, device))
    assert whole > passes + 2 * B * S * H * D * T / device.peak["float32"]
    # Every factor shares out all of the work.
    for factor in "bsht":
        assert parts.forward[names[factor]] == pytest.approx(whole / 2, rel=0.1)
    assert parts.backward.all() == trained
    assert (parts.backward >= 2 * parts.forward).all() == trained
