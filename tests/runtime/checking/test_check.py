"""Observations of a plan's check on one device, and the optimizer that checks and runs take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.frontends.load import ModelOptions, load_model
from autopar.plan import Plan
from autopar.runtime.checking import observe_model
from autopar.runtime.checking.check import optimizer_of, planned_optimizer
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.optimizers import LocalOptimizer


def test_gradients_that_the_caller_left_do_not_count() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    inputs = torch.randn(3, 4)
    graph = load_model(model, ModelOptions(), (inputs,)).graph
    fresh = observe_model(model, graph, [inputs], optimizer="none", steps=1)
    assert fresh.gradients.keys() == {"weight", "bias"}
    model(inputs).sum().backward()
    again = observe_model(model, graph, [inputs], optimizer="none", steps=1)
    assert all(torch.equal(again.gradients[name], value) for name, value in fresh.gradients.items())


class Net(nn.Module):
    """Two products and a norm, whose parameters are split into shards of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Four columns."""
        output: Tensor = self.parts(x)
        return output


ROWS = torch.linspace(-1, 1, 24).view(4, 6)


def _weights(plan: Plan, optimizer: str) -> list[tuple[Tensor, Tensor]]:
    """Weights after three steps of the planned optimizer, beside those of torch's on DTensors."""
    updated: list[list[Tensor]] = []
    for planned in (True, False):
        module = autopar.parallelize(Net(), plan)
        parameters = module.graph_parameters()
        stepper = (planned_optimizer if planned else as_on_one_device)(optimizer, module)
        assert stepper is not None and isinstance(stepper, LocalOptimizer) == planned
        for _ in range(3):
            module.loss(ROWS).backward()  # type: ignore[no-untyped-call]
            stepper.step()
            module.zero_grad()
        updated.append([whole_of(parameter) for parameter in parameters.values()])
    ours, torchs = updated
    return list(zip(ours, torchs, strict=True))


def as_on_one_device(name: str, module: ParallelModule) -> torch.optim.Optimizer | None:
    return optimizer_of(name, module.graph_parameters())


def whole_of(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_updates_on_shards_are_those_of_dtensors_to_the_bit(optimizer: str) -> None:
    plan = autopar.plan(
        Net(), (ROWS,), devices=2, cluster="local-cpu", scheme="zero3", optimizer=optimizer
    )
    assert any("S" in one.storage for one in plan.parameters.values())
    for pairs in run_ranks(_weights, 2, plan, optimizer):
        assert pairs and all(torch.equal(*pair) for pair in pairs)
