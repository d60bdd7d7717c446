"""Dropout by torch's own generator draws in the order of the input's memory, as torch does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.runtime.launch import run_ranks
from autopar.runtime.local_forms.dropout import exact_dropout


@pytest.mark.parametrize("dims", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_a_transposed_input_has_the_mask_of_one_device(dims: tuple[int, ...]) -> None:
    x = torch.rand(4, 6, 5, dtype=torch.float64).add(1).permute(dims)
    torch.manual_seed(3)
    wanted = functional.dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(exact_dropout(x, 0.5, x.shape, []), wanted)


class Net(nn.Module):
    """Dropout after a batch norm of a transposed input, whose result torch writes in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        """The loss of rows of features."""
        y = self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)
        return functional.dropout(y, 0.5).square().mean()


def _planned(x: Tensor) -> tuple[float, float]:
    torch.manual_seed(0)
    module = Net()
    alone = copy.deepcopy(module)
    plan = autopar.plan(module, x, devices=2, cluster="local-cpu", scheme="data")
    planned = autopar.parallelize(module, plan, exact_random=True)
    torch.manual_seed(3)
    ours = float(planned(x).detach())
    torch.manual_seed(3)
    return ours, float(alone(x).detach())


def test_a_split_batch_norm_lies_in_memory_as_torchs() -> None:
    x = torch.rand(8, 6, 4, generator=torch.Generator().manual_seed(0))
    for ours, wanted in run_ranks(_planned, 2, x):
        assert ours == pytest.approx(wanted, rel=1e-5)
