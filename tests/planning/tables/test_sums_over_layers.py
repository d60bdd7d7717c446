"""Values that layers add up are planned; models that have nothing to plan are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import UsageError


class Layer(nn.Module):
    """A layer with a loss of its own, as routers of experts have."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.up(x).softmax(-1)
        return x + self.down(share), share.mean((0, 1)).square().sum()


class Net(nn.Module):
    """Layers whose losses add up one by one."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            x, more = layer(x)
            total = total + more
        return x.square().mean() + 0.01 * total


@pytest.mark.parametrize("layers", [2, 4, 7])
def test_losses_of_layers_add_up(layers: int) -> None:
    plan = autopar.plan(
        Net(layers), (torch.zeros(8, 4, 16),), devices=2, cluster="local-cpu", scheme="data"
    )
    assert len([name for name in plan.operators if name.endswith("up/linear")]) == layers


class Doubled(nn.Module):
    """Nothing to train or to store."""

    def forward(self, x: Tensor) -> Tensor:
        return (2 * x).mean()


def test_a_model_without_parameters_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="no operator of the model depends on a parameter"):
        autopar.plan(Doubled(), (torch.zeros(8, 4),), devices=2, cluster="local-cpu")
