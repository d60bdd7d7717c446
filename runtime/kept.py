"""Values of parameters that are made once a step and kept from one micro-batch to the next, and the gradients that meet there.

once     all micro-batches but the last add their gradient up where the value is used; the last one adds that to its own and sends
         the sum back along the chain
shards   every micro-batch sends its gradient back along the chain
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .collectives import Chain, act


@dataclass(slots=True)
class Progress:
    """Which of `count` micro-batches runs."""

    index: int = 0
    count: int = 1

    @property
    def last(self) -> bool:
        """Whether no other comes after it."""
        return self.index == self.count - 1


class _Home(torch.autograd.Function):
    """A kept value: it costs nothing on the way ahead; its gradient goes back along the chain, with what was added up before."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, kept: list[Tensor], before: Tensor | None, chain: Chain) -> Tensor:
        ctx.before, ctx.chain = before, chain
        return kept[0].view_as(kept[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0]
        if ctx.before is not None and ctx.before.grad is not None:
            gradient = gradient + ctx.before.grad
            ctx.before.grad = None
        for _, back, group in reversed(ctx.chain):
            gradient = act(gradient, back, group)
        return gradient, None, None, None


class Kept:
    """A redistribution of a parameter that runs once a step."""

    def __init__(self, chain: Chain, progress: Progress, *, once: bool, differentiable: bool) -> None:
        self.chain, self.progress, self.once, self.differentiable = chain, progress, once, differentiable
        self.value: Tensor | None = None
        self.leaf: Tensor | None = None

    def forget(self) -> None:
        """Let go of the value at the end of a step."""
        self.value = self.leaf = None

    def __call__(self, value: Tensor) -> Tensor:
        """The value at the end of the chain, from that at its start."""
        if self.value is None:
            made = value.detach()
            with torch.no_grad():
                for ahead, _, group in self.chain:
                    made = act(made, ahead, group)
            self.value = made
        if not (self.differentiable and value.requires_grad and torch.is_grad_enabled()):
            return self.value
        if self.once and not self.progress.last:
            if self.leaf is None:
                self.leaf = self.value.detach().requires_grad_()
            return self.leaf
        out: Tensor = _Home.apply(value, [self.value], self.leaf if self.once else None, self.chain)  # type: ignore[no-untyped-call]
        return out
