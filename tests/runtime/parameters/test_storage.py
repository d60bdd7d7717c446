"""Stored parameters on meshes with axes of one rank, which split nothing."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import autopar
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from tests.runtime.training.nets import language, tokens

STAGES = {"stages": 2, "micro_batches": 2}
ROWS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one device": (1, {}),
    "one device in stages": (2, STAGES),
    "one device on two axes, in stages": (2, {"mesh": (1, 1), **STAGES}),
    "an axis of one rank": (2, {"mesh": (2, 1)}),
    "an axis of one rank, in stages": (4, {"mesh": (1, 2), **STAGES}),
}


@functools.cache
def _planned(row: str) -> Plan:
    devices, options = ROWS[row]
    given = language(), (tokens(0),)
    return autopar.plan(*given, devices=devices, cluster="local-cpu", scheme="zero3", **options)


def _trained(plan: Plan) -> tuple[list[float], set[int]]:
    """Losses under an optimizer that asks DTensors for groups, and the axes that split."""
    module = autopar.parallelize(language(), plan, (tokens(0),))
    optimizer = autopar.Lamb(module.parameters(), lr=0.1)
    torch.manual_seed(3)
    losses = [float(module.train_step(tokens(step), optimizer)) for step in range(3)]
    axes = {
        axis
        for value in module.parameters()
        if isinstance(value, DTensor)
        for axis, placement in enumerate(value.placements)
        if not placement.is_replicate()
    }
    return losses, axes


@pytest.mark.parametrize("row", ROWS)
def test_axes_of_one_rank_split_nothing(row: str) -> None:
    plan = _planned(row)
    assert any("S" in held.storage for held in plan.parameters.values())
    mesh = (plan.stages[0] if plan.stages else plan).mesh
    wanted = run_ranks(_trained, 1, _planned("one device"))[0][0]
    for losses, axes in run_ranks(_trained, plan.devices, plan, timeout=120):
        assert losses == pytest.approx(wanted, rel=1e-6)
        assert axes <= {axis for axis, spec in enumerate(mesh) if spec.size > 1}
