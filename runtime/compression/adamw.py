"""AdamW with moments in 16 bits.

Means are kept as 1-6-9, variances as 0-6-10, with a power of two for each tensor.

    m = b1 m + (1 - b1) g     v = b2 v + (1 - b2) g^2
    w = w (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

The moments are computed in float32 and rounded when they are stored. A tensor's codes are those of
its numbers divided by 2^k, with the largest then above 2^30 and at most 2^31. So nothing overflows,
and numbers below 2^-70 of the largest become zero. A variance that decays by less than half a unit
in the last place (b2 above 0.9995) would never change, so such a b2 is refused.

A checkpoint holds numbers, not codes, because k is that of a shard. Rounded numbers have exact
codes again: the largest has the same k, or a smaller one. So a training resumed under the same plan
equals one that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import UsageError
from autopar.runtime.parameters.closures import Closure, loss_of
from autopar.runtime.parameters.optimizer_states import keep_integers, lying_as
from autopar.runtime.parameters.storage import local_of

from .minifloat import MEAN, VARIANCE, MiniFloat

TOP = 31
"""The power of two to which the largest number of a tensor is scaled.

Scales are powers of two, so it may end below.
"""
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
            raise UsageError(
                f"betas {betas}: what decays slower than {SLOWEST:.5f} a step stands still in 16 "
                "bits; the nearest is 0.999"
            )
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    self._update(value, group)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict as torch does, but keep codes as codes."""
        super().load_state_dict(dict(state_dict))
        # torch casts the state to the type of the parameter, which would destroy codes.
        keep_integers(self, state_dict)

    def plain_state(self, value: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter for a checkpoint.

        Its moments are numbers, in the parameter's layout.
        """
        work = _working_type(value)
        moments = {
            name: lying_as(value, _taken(form, state[name], state[f"{name}_power"], work))
            for name, form in FORMS.items()
        }
        return {"step": state["step"], **moments}

    def own_state(self, value: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """The codes of this rank's shard, from the numbers of the moments in a checkpoint."""
        entries = {"step": state["step"], **_nothing(value)}
        for name, form in FORMS.items():
            _put(form, entries[name], entries[f"{name}_power"], local_of(state[name]))
        return entries

    def _update(self, value: Tensor, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        own = self.state[value]
        shard = local_of(value)
        if not own:
            # The counter is on the CPU, as torch's optimizers have it: reading it waits for no GPU.
            own.update(step=torch.zeros(()), **_nothing(value))
        own["step"] += 1
        count = float(own["step"])
        work = _working_type(value)
        assert value.grad is not None
        gradient = local_of(value.grad).to(work)
        mean = _taken(MEAN, own["mean"], own["mean_power"], work).lerp_(gradient, 1 - first)
        variance = (
            _taken(VARIANCE, own["variance"], own["variance_power"], work)
            .mul_(second)
            .addcmul_(gradient, gradient, value=1 - second)
        )
        root = (variance / (1 - second**count)).sqrt_().add_(group["eps"])
        # The decay comes before the update, in the order of torch's AdamW.
        shard.mul_(1 - group["lr"] * group["weight_decay"])
        shard.sub_((mean / (1 - first**count) / root * group["lr"]).to(shard.dtype))
        _put(MEAN, own["mean"], own["mean_power"], mean)
        _put(VARIANCE, own["variance"], own["variance_power"], variance)


FORMS: Mapping[str, MiniFloat] = {"mean": MEAN, "variance": VARIANCE}
"""The formats of the moments, by name."""


def _working_type(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def _nothing(value: Tensor) -> dict[str, Tensor]:
    """Moments of zero, with their powers of two."""
    device = local_of(value).device
    codes = {name: torch.zeros_like(value.detach(), dtype=torch.int16) for name in FORMS}
    return codes | {f"{name}_power": torch.zeros((), device=device) for name in FORMS}


def _taken(form: MiniFloat, codes: Tensor, power: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ldexp(form.decode(local_of(codes), dtype), power.to(torch.int32))


def _put(form: MiniFloat, codes: Tensor, power: Tensor, value: Tensor) -> None:
    """Round a moment into its codes, scaled by a power of two from its largest number.

    NaN and infinity give NaN.
    """
    largest = value.abs().max() if value.numel() else value.new_zeros(())
    fraction, exponent = torch.frexp(largest)
    # frexp gives 2^k as 0.5 times 2^(k + 1); scaled, it is to be 2^31 and not 2^30.
    exponent = exponent - (fraction == 0.5).to(exponent.dtype)
    shift = torch.where(largest > 0, exponent - TOP, torch.zeros_like(exponent))
    local_of(codes).copy_(form.encode(torch.ldexp(value, -shift)))
    # Decided on the device: the host would wait for it once for each parameter.
    power.copy_(torch.where(largest.isfinite(), shift.to(power.dtype), float("nan")))
