"""AdamW whose moments are kept in 16 bits: means as 1-6-9, variances as 0-6-10, each tensor with a power of two beside it.

    m = b1 m + (1 - b1) g     v = b2 v + (1 - b2) g^2     w = w (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

The moments are made in float32 and rounded when they are put away. A tensor's codes are those of its numbers divided by 2^k, the largest
of which then lies below 2^31: so nothing overflows, and zero is what is 2^-70 of the largest. A variance that decays by less than half a
unit in the last place (b2 above 0.9995) would stay where it is, so such a b2 is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import UsageError

from ..closures import Closure, loss_of
from ..parameters import local_of
from .minifloat import MEAN, VARIANCE, MiniFloat

TOP = 31
"""The largest number of a tensor is brought below this power of two."""
SLOWEST = 1 - 2.0 ** -(VARIANCE.mantissa + 1)


class SmallAdamW(Optimizer):
    """AdamW with half of its state; `local_optimizer` runs it on shards as any other."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if max(betas) > SLOWEST:
            raise UsageError(f"betas {betas}: what decays slower than {SLOWEST:.5f} a step stands still in 16 bits; the nearest is 0.999")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    self._update(value, group)
        return loss

    def _update(self, value: Tensor, group: dict[str, Any]) -> None:
        (first, second), own, shard = group["betas"], self.state[value], local_of(value)
        if not own:
            nothing = torch.zeros_like(value, dtype=torch.int16)
            scales = {name: torch.zeros((), device=shard.device) for name in ("mean_power", "variance_power")}
            own.update(step=torch.zeros(()), mean=nothing, variance=torch.zeros_like(nothing), **scales)
        own["step"] += 1
        count, work = float(own["step"]), torch.float64 if shard.dtype == torch.float64 else torch.float32
        assert value.grad is not None
        gradient = local_of(value.grad).to(work)
        mean = _taken(MEAN, own["mean"], own["mean_power"], work).lerp_(gradient, 1 - first)
        variance = (
            _taken(VARIANCE, own["variance"], own["variance_power"], work).mul_(second).addcmul_(gradient, gradient, value=1 - second)
        )
        root = (variance / (1 - second**count)).sqrt_().add_(group["eps"])
        shard.mul_(1 - group["lr"] * group["weight_decay"])
        shard.sub_((mean / (1 - first**count) / root * group["lr"]).to(shard.dtype))
        _put(MEAN, own["mean"], own["mean_power"], mean)
        _put(VARIANCE, own["variance"], own["variance_power"], variance)


def _taken(form: MiniFloat, codes: Tensor, power: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ldexp(form.decode(local_of(codes), dtype), power.to(torch.int32))


def _put(form: MiniFloat, codes: Tensor, power: Tensor, value: Tensor) -> None:
    """Round a moment into its codes, with the power of two that its largest number asks for; one that is no number stays none."""
    largest = value.abs().max() if value.numel() else value.new_zeros(())
    _, exponent = torch.frexp(largest)
    power.copy_(torch.where(largest > 0, exponent - TOP, torch.zeros_like(exponent)))
    local_of(codes).copy_(form.encode(torch.ldexp(value, -power.to(torch.int32))))
    if not torch.isfinite(largest):
        power.fill_(float("nan"))
