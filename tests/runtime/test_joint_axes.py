"""Plans that are alike on two axes: their steps are one collective over both, as priced, and ranks
compute what one device does.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import autopar
from autopar.frontends.load import ModelOptions, load_model
from autopar.runtime.run import run_plan
from autopar.sharding.mesh import JOINED

pytestmark = pytest.mark.usefixtures("strict_collectives")
LARGE = (pytest.mark.slow, pytest.mark.ci)


class Classifier(nn.Module):
    """Two products and a cross entropy with a vocabulary that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 128, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x + self.down(torch.relu(self.up(x)))), target)


@pytest.mark.parametrize("mesh", [(2, 2), pytest.param((2, 4), marks=LARGE)])
@pytest.mark.parametrize("scheme", ["data", "zero3", "megatron"])
def test_a_plan_over_two_axes_equals_one_device(scheme: str, mesh: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    inputs = torch.randn(16, 32), torch.randint(0, 128, (16,))
    zero = {"data": 0, "zero3": 3, "megatron": 0}[scheme]
    asked = {
        "scheme": scheme,
        "mesh": mesh,
        "zero": zero,
        "stages": 1,
        "micro_batches": 1,
        "recompute": "none",
    }
    plan = autopar.plan(Classifier(), inputs, devices=math.prod(mesh), cluster="dgx-h100", **asked)
    moved = {(c.kind, JOINED in c.axis) for c in plan.collectives if c.nbytes > 64}
    assert moved and all(both for _, both in moved), moved
    report = run_plan(load_model(Classifier(), ModelOptions(), inputs), plan, steps=2, check=True)
    assert report.ok and "as priced" in report.collectives
