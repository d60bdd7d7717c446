"""LAMB and Momentum, as MindSpore has them, over parameters that may be split.

LAMB (You et al., arXiv:1904.00962): each parameter takes a step along Adam's update u_t (with
weight decay) of its own norm,

    m_t = b1 m + (1 - b1) g      v_t = b2 v + (1 - b2) g^2
    u_t = (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t)) + eps) + decay w
    w_t = w - lr (|w| / |u_t|) u_t                              (the ratio is 1 where a norm is 0)

The squares of both norms of all parameters are summed over the ranks that share them in one message
for each set of mesh axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from autopar.runtime.parameters.closures import Closure, loss_of
from autopar.runtime.parameters.storage import local_of


class Momentum(SGD):
    """SGD with momentum, as torch's without dampening.

    v = momentum v + g
    w = w - lr v                       (with `nesterov`: w - lr (g + momentum v))
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=0.0,
            weight_decay=weight_decay,
            nesterov=nesterov,
            **options,
        )


class Lamb(Optimizer):
    """The LAMB optimizer; its state has the layout of the parameters."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        loss = loss_of(closure)
        updates = [
            (value, group, self._update(value, group))
            for group in self.param_groups
            for value in group["params"]
            if value.grad is not None
        ]
        # All norms at once, so that ranks communicate once for all parameters.
        norms = _norms([(value, update) for value, _, update in updates])
        for (value, group, update), norm in zip(updates, norms, strict=True):
            ratio = torch.where((norm > 0).all(), norm[0] / norm[1], torch.ones_like(norm[0]))
            local_of(value).add_(update * (-group["lr"] * ratio).to(update.dtype))
        return loss

    def _update(self, value: Tensor, group: dict[str, Any]) -> Tensor:
        """Adam's update of this rank's shard, with the decay of weights."""
        first, second = group["betas"]
        own = self.state[value]
        # The names of torch's Adam, so that tools which read its state read this one.
        if not own:
            own["step"] = torch.zeros(())
            own["exp_avg"] = torch.zeros_like(value)
            own["exp_avg_sq"] = torch.zeros_like(value)
        own["step"] += 1
        count = float(own["step"])
        assert value.grad is not None
        gradient = local_of(value.grad)
        mean = local_of(own["exp_avg"])
        square = local_of(own["exp_avg_sq"])
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (square / (1 - second**count)).sqrt_().add_(group["eps"])
        update: Tensor = (mean / (1 - first**count)).div_(root)
        if group["weight_decay"]:
            update.add_(local_of(value), alpha=group["weight_decay"])
        return update


def _norms(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The norms of every parameter and of its update, [2] each, over all ranks that share it."""
    sums = [torch.stack([_square(local_of(value)), _square(update)]) for value, update in pairs]
    by_group: dict[Any, list[int]] = {}
    for number, (value, _) in enumerate(pairs):
        if isinstance(value, DTensor):
            placements = enumerate(value.placements)
            axes = tuple(axis for axis, placement in placements if not placement.is_replicate())
            by_group.setdefault((value.device_mesh, axes), []).append(number)
    for (mesh, axes), numbers in by_group.items():
        if axes:
            # One message for all parameters that are split along the same axes.
            message = torch.stack([sums[number] for number in numbers])
            for axis in axes:
                dist.all_reduce(message, group=mesh.get_group(axis))
            for number, summed in zip(numbers, message, strict=True):
                sums[number] = summed
    return [squares.sqrt() for squares in sums]


def _square(value: Tensor) -> Tensor:
    """The square of a norm, added up in double precision."""
    square: Tensor = torch.linalg.vector_norm(value, dtype=torch.float64).square()
    return square
