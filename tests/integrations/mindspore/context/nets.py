"""Small models for the context: their builders, and what one device makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.plan import Plan

BATCH = 8
WIDTH = 12
RANKS = 2


def inputs(seed: int = 1) -> Tensor:
    """A whole batch."""
    return torch.randn(
        BATCH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


class Many(nn.Module):
    """25 layers with biases: 50 parameters; the loss is a mean, or a sum."""

    def __init__(self, layers: int = 25, *, total: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.total = total

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum() if self.total else x.square().mean()


class Waists(nn.Module):
    """Layers that are wide inside and narrow between, where a pipeline may be cut; two of them are
    cut by hand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(*((WIDTH, 2 * WIDTH) if i % 2 == 0 else (2 * WIDTH, WIDTH))) for i in range(6)
        )
        autopar.shard(self.layers[1], ((1, 1), (2, 1)))
        autopar.shard(self.layers[4], ((2, 1), (1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Two(nn.Module):
    """Two matrix products, each an operator that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = autopar.shard(torch.matmul, ((4, 1), (1, 1)))
        self.second = autopar.shard(torch.matmul, ((1, 1), (1, 4)))
        self.w = nn.Parameter(torch.randn(WIDTH, 8))
        self.v = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        """Both products."""
        output: Tensor = self.second(self.first(x, self.w), self.v)
        return output


class Normed(nn.Module):
    """A batch norm by hand: its mean is a reduction over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mean = _Mean()

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        y = self.layer(x)
        return torch.tanh(y - self.mean(y)).square().mean()


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0)


class BatchNormed(nn.Module):
    """torch's batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return torch.tanh(self.norm(self.layer(x))).square().mean()


def build(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with weights of that seed, in float64."""
    torch.manual_seed(seed)
    return kind().double()


def gradients_of(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The gradients of one device, by parameter."""
    module.zero_grad()
    module(x).backward()
    return {
        name: value.grad.clone()
        for name, value in module.named_parameters()
        if value.grad is not None
    }


def few() -> nn.Module:
    """Three layers of them."""
    return Many(3)


def small_plan(module: nn.Module, **keys: Any) -> Plan:
    """The plan of a module for two ranks under these keys of the context, which stay set."""
    autopar.set_auto_parallel_context(device_num=RANKS, **keys)
    return autopar.plan(module, (inputs(),), cluster="local-cpu", optimizer="sgd")
