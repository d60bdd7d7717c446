"""The gradient of a loss, as far as the host knows it without waiting for a device.

Gradients that were made for a guess must be multiplied by the actual gradient of the loss, in one
more pass over all of them. Mostly it is 1, as it was guessed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_on_host(value: Tensor) -> bool:
    """Whether the host reads a value without waiting for a device."""
    return value.device.type == "cpu"


class UnreadLoss(Tensor):
    """A loss on a device: its backward pass starts from a gradient that the host knows unread.

    What is computed from it is an ordinary tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """As torch's."""
        if gradient is None:
            gradient = torch.ones_like(self)
            gradient.is_known_one = True  # type: ignore[attr-defined]
        super().backward(gradient, *args, **kwargs)  # type: ignore[no-untyped-call]


def is_known_one(gradient: Tensor) -> bool:
    """Whether it is the very tensor with which `UnreadLoss` has begun, not written to since."""
    return getattr(gradient, "is_known_one", False) and gradient._version == 0
