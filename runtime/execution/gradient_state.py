"""The gradients that wait to be summed: those of backward passes under `no_sync`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.storage import local_of

Shares = dict[int, Gradients]
"""This rank's shares of gradients, not yet reduced, by chunk."""


class Pending:
    """Gradient shares of backward passes under `no_sync`; they belong to the gradients of then."""

    def __init__(self) -> None:
        self.shares: Shares = {}
        self._marks: dict[str, tuple[Tensor, int]] = {}

    def clear(self) -> None:
        """Drop all."""
        self.shares = {}
        self._marks = {}

    def keep(self, shares: Shares) -> None:
        """Add the shares of a backward pass."""
        for number, more in shares.items():
            if number in self.shares:
                self.shares[number].join(more)
            else:
                self.shares[number] = more

    def mark(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Remember the present gradients, to detect whether the caller resets them."""
        gradients = {
            name: local_of(parameter.grad)
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }
        # Autograd counts the writes to a tensor: zero_grad(set_to_none=False) shows only there.
        self._marks = {name: (value, value._version) for name, value in gradients.items()}

    def current(self, parameters: Mapping[str, nn.Parameter]) -> Shares:
        """Take the shares away, without those of parameters whose gradient has been reset since."""
        for name, (value, version) in self._marks.items():
            if _is_reset(parameters[name].grad, value, version):
                for shares in self.shares.values():
                    shares.drop(name)
        pending = self.shares
        self.clear()
        return pending if any(shares.at for shares in pending.values()) else {}


def _is_reset(gradient: Tensor | None, value: Tensor, version: int) -> bool:
    """Whether a gradient is no longer the tensor that was marked, or has been written to."""
    if gradient is None:
        return True
    local = local_of(gradient)
    return local._version != version or local.data_ptr() != value.data_ptr()


class GradientState:
    """The state of gradients that the calls of one module share."""

    def __init__(self) -> None:
        self.pending = Pending()
        self.synchronize = True
        # Autograd enters a node only if some input requires a gradient, and a stage may have no
        # trained parameter.
        self.anchor = torch.zeros((), requires_grad=True)

    @property
    def sums_at_once(self) -> bool:
        """Whether a backward pass can reduce its gradients itself: no other shares join them."""
        return self.synchronize and not self.pending.shares
