"""torch's own random numbers on micro-batches and segments: every micro-batch draws from where the step began, as one device does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """The state of the generator that operators on `device` draw from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Draw from this state on."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class GeneratorStates:
    """Where each micro-batch of a call is in the stream of random numbers; nothing where it is not `active`."""

    def __init__(self, device: torch.device, *, active: bool) -> None:
        self.device, self.active = device, active
        self.start = random_state(device) if active else None
        self.at: dict[int, Tensor] = {}

    def enter(self, index: int) -> Tensor | None:
        """Go on where the micro-batch left off; the state there."""
        if self.start is None:
            return None
        state = self.at.get(index, self.start)
        set_random_state(self.device, state)
        return state

    def leave(self, index: int) -> None:
        """Remember where the micro-batch is."""
        if self.active:
            self.at[index] = random_state(self.device)

    @contextmanager
    def repeating(self, state: Tensor | None) -> Iterator[None]:
        """Draw once more what was drawn from `state` on."""
        if state is None:
            yield
            return
        now = random_state(self.device)
        set_random_state(self.device, state)
        try:
            yield
        finally:
            set_random_state(self.device, now)
