"""Operators of a user: custom ones of `torch.library` with gradients, and functions that ask for
their rules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BATCH = 12
WIDTH = 6
HIDDEN = 12


@torch.library.custom_op("autopar_tests::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor, scale: float) -> Tensor:
    """x * tanh(gate) * scale, with one gate for each feature."""
    return x * torch.tanh(gate) * scale


@gated.register_fake
def _(x: Tensor, gate: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _gated_backward(ctx: Any, ahead: Tensor) -> tuple[Tensor, Tensor, None]:
    x, gate = ctx.saved_tensors
    bent = torch.tanh(gate)
    leading = tuple(range(ahead.dim() - gate.dim()))
    return ahead * bent * ctx.scale, (ahead * x * (1 - bent * bent) * ctx.scale).sum(leading), None


def _gated_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


gated.register_autograd(_gated_backward, setup_context=_gated_context)


@torch.library.custom_op("autopar_tests::mixed", mutates_args=())
def mixed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x @ weight + bias: a product that no table knows."""
    return x @ weight + bias


@mixed.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def _mixed_backward(ctx: Any, ahead: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return ahead @ weight.t(), x.t() @ ahead, ahead.sum(0)


mixed.register_autograd(
    _mixed_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2])
)


@torch.library.custom_op("autopar_tests::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    """x without the mean of its last dim, which must stay whole."""
    return x - x.mean(-1, keepdim=True)


centred.register_fake(torch.empty_like)
centred.register_autograd(lambda ctx, ahead: ahead - ahead.mean(-1, keepdim=True))


@torch.library.custom_op("autopar_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """x with noise."""
    return x + torch.rand_like(x)


@torch.library.custom_op("autopar_tests::scaled_in_place", mutates_args=("x",))
def scaled_in_place(x: Tensor) -> Tensor:
    """2 x, leaving that in x too."""
    x.mul_(2)
    return x.clone()


class Own(nn.Module):
    """Two layers with own operators between and around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.gate = nn.Parameter(torch.linspace(-1, 1, HIDDEN))
        self.weight = nn.Parameter(torch.linspace(-1, 1, HIDDEN * WIDTH).reshape(HIDDEN, WIDTH))
        self.bias = nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of what comes out."""
        y = torch.ops.autopar_tests.gated(self.up(x), self.gate, 0.5)
        y = torch.ops.autopar_tests.mixed(y, self.weight, self.bias)
        return torch.ops.autopar_tests.centred(y).pow(2).mean()


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module in double precision, with its example inputs."""
    torch.manual_seed(0)
    return Own().double(), (torch.randn(BATCH, WIDTH, dtype=torch.float64),)


def gated_example() -> tuple[Any, tuple[Any, ...]]:
    """An operator with example inputs, as `autopar discover package:function` wants it."""
    generator = torch.Generator().manual_seed(1)
    return gated, (
        torch.randn(4, 5, 7, generator=generator),
        torch.randn(7, generator=generator),
        2.0,
    )


def outer_sum(x: Tensor, y: Tensor) -> Tensor:
    """A function that is no operator."""
    return x.sum(0)[:, None] * y


def outer_sum_inputs() -> tuple[Tensor, Tensor]:
    """Its example inputs."""
    return torch.randn(4, 5), torch.randn(6)
