"""Modules with a loss of their own on two ranks, under several plans, beside one device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

import autopar
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks

PLANS: Mapping[str, Mapping[str, Any]] = {
    "data, 2 micro-batches": {"scheme": "data", "stages": 1, "micro_batches": 2},
    "zero3, 4 micro-batches": {"scheme": "zero3", "stages": 1, "micro_batches": 4},
    "1f1b, 4 micro-batches": {"stages": 2, "schedule": "1f1b", "micro_batches": 4},
}


def planned(net: nn.Module, inputs: Sequence[Tensor], **options: Any) -> Plan:
    """A plan for two ranks of this machine."""
    options = {"devices": 2, "cluster": "local-cpu", "recompute": "none", **options}
    return autopar.plan(net, tuple(inputs), **options)


def wrong(net: nn.Module, inputs: Sequence[Tensor], plans: Sequence[Plan]) -> list[list[str]]:
    """By plan the names of gradients ("loss" for the loss) that differ on one of two ranks."""
    results = run_ranks(_on_rank, 2, net, tuple(inputs), plans)
    assert results[0] == results[1]
    names: list[list[str]] = results[0]
    return names


def _on_rank(net: nn.Module, inputs: tuple[Tensor, ...], plans: Sequence[Plan]) -> list[list[str]]:
    alone = copy.deepcopy(net)
    expected = alone(*inputs)
    expected.backward()
    names = []
    for plan in plans:
        module = autopar.parallelize(copy.deepcopy(net), plan, inputs)
        loss = module(*inputs)
        loss.backward()
        parameters = module.graph_parameters()
        gradients = module.full_values({n: p.grad for n, p in parameters.items()})
        pairs = {n: (gradients[n], p.grad) for n, p in alone.named_parameters()}
        pairs["loss"] = loss.detach(), expected.detach()
        names.append([n for n, pair in pairs.items() if not _close(*pair)])
    return names


def _close(actual: Tensor, expected: Tensor | None) -> bool:
    assert expected is not None
    scale = max(1.0, float(expected.abs().max()))
    return float((actual - expected).abs().max()) <= 1e-9 * scale
