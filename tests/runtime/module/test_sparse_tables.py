"""Tables whose gradients are sparse on one device train under plans to the same weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks

SCHEMES: dict[str, dict[str, Any]] = {
    "data": {"scheme": "data"},
    "zero3": {"scheme": "zero3"},
    "1f1b": {"stages": 2, "micro_batches": 2, "schedule": "1f1b"},
}
TOKENS = torch.arange(32).reshape(8, 4) % 20


class Net(nn.Module):
    """A sparse table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.out = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens)).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@functools.cache
def plan_of(scheme: str) -> Plan:
    """Made before the ranks are forked."""
    return autopar.plan(net(), (TOKENS,), devices=2, cluster="local-cpu", **SCHEMES[scheme])


def _trained(scheme: str) -> tuple[dict[str, Tensor], str]:
    module: Any = net()
    if scheme:
        module = autopar.parallelize(module, plan_of(scheme), (TOKENS,))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    said = ""
    for _ in range(3):
        optimizer.zero_grad()
        (module.loss(TOKENS) if scheme else module(TOKENS)).backward()
        optimizer.step()
    if not scheme:
        return {name: value.detach() for name, value in module.named_parameters()}, said
    with pytest.raises(UsageError) as raised:
        module.clip_grad_norm_(1.0, 0.0)
    return module.full_values(module.graph_parameters()), str(raised.value)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_those_of_one_device(scheme: str) -> None:
    plan_of(scheme)
    actual = run_ranks(_trained, 2, scheme)
    wanted, _ = run_ranks(_trained, 1, "")[0]
    for weights, said in actual:
        torch.testing.assert_close(weights, wanted)
        assert "a norm above 0" in said
