"""Optimizers pass over stand-ins: a parameter of another stage is updated there, and has its state
there.

So any optimizer may be made over all parameters, also one that reads numbers of each. While it
makes a step, stand-ins have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _foreach_utils

from .elsewhere import Elsewhere
from .stand_in import StandIn

_STATE = {"watched": False}


def pass_over_stand_ins() -> None:
    """Let every optimizer of this process pass over stand-ins from now on."""
    if not _STATE["watched"]:
        _STATE["watched"] = True
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)
        # Torch clips lists of these types by its functions over lists, on devices that have them.
        _foreach_utils._foreach_supported_types.append(StandIn)


def _stand_ins(optimizer: Optimizer) -> list[Elsewhere]:
    return [
        value
        for group in optimizer.param_groups
        for value in group["params"]
        if isinstance(value, Elsewhere)
    ]


def _put_aside(optimizer: Optimizer) -> None:
    scaled = getattr(optimizer, "grad_scale", None) is not None
    with torch._C.DisableTorchFunctionSubclass():
        for value in _stand_ins(optimizer):
            if value.grad is not None:
                value.aside = value.grad
                value.grad = None
                # A fused update divides the gradients by a scale that it alone reads.
                if scaled and isinstance(value.aside, Elsewhere):
                    value.aside.figures.values = None


def _put_back(optimizer: Optimizer) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for value in _stand_ins(optimizer):
            if value.aside is not None:
                value.grad = value.aside
                value.aside = None


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Put gradients aside; those that a closure makes, too."""
    if not _stand_ins(optimizer):
        return None
    _put_aside(optimizer)
    # An optimizer may call it several times, and each backward pass makes gradients.
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None
    wrapped = _closure(optimizer, closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped}
    return (args[0], wrapped, *args[2:]), kwargs


def _closure(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    def called() -> Any:
        _put_back(optimizer)
        loss = closure()
        _put_aside(optimizer)
        return loss

    return called


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _put_back(optimizer)
