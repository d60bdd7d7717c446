"""Code of a model that asks for its mode is followed in evaluation, or refused on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.runtime.launch import run_ranks

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PLANNED: dict[str, Any] = {"devices": 2, "cluster": "local-cpu", "proof": False}


class Branching(nn.Module):
    """A loss that is doubled in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square."""
        y = self.second(self.first(x).tanh())
        return (y * 2 if self.training else y).square().mean()


def losses(model: nn.Module, plan: autopar.Plan) -> list[tuple[float, float]]:
    """The planned losses beside one device's, in turns of the mode."""
    module = autopar.parallelize(model, plan, (X,), check=False)
    twin = copy.deepcopy(model)
    told = []
    for training in (True, False, True):
        module.train(training)
        twin.train(training)
        told.append((module(X).item(), twin(X).item()))
    return told


@pytest.mark.parametrize("scheme", ["data", "megatron"])
def test_evaluation_takes_the_other_branch(scheme: str) -> None:
    torch.manual_seed(0)
    model = Branching().double()
    plan = autopar.plan(model, (X,), **PLANNED, scheme=scheme)
    for told in run_ranks(losses, 2, model, plan, timeout=60):
        for planned, alone in told:
            assert planned == pytest.approx(alone, abs=1e-12)


def refused(model: nn.Module, plan: autopar.Plan) -> str:
    """Why evaluation is refused."""
    with pytest.raises(PlanError) as error:
        losses(model, plan)
    return str(error.value)


def test_stages_that_begin_in_a_branch_are_refused_by_every_rank() -> None:
    model = Branching().double()
    options = {"stages": 2, "micro_batches": 2, "schedule": "1f1b"}
    plan = autopar.plan(model, (X,), **PLANNED, **options)
    assert "mul" in {stage.first for stage in plan.stages}
    for said in run_ranks(refused, 2, model, plan, timeout=60):
        assert "reads its mode (self.training)" in said
