"""The loss that an optimizer's closure computes before a step."""

from __future__ import annotations

from collections.abc import Callable

import torch

Closure = Callable[[], float]


def loss_of(closure: Closure | None) -> float | None:
    """The result of `closure`, with gradients recorded; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
