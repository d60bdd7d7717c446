"""torch's own random numbers on micro-batches and segments.

Each micro-batch draws from the step's start on, as the same batch would on one device.
"""

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
    """The position of each micro-batch of a call in the stream of random numbers.

    Micro-batches alternate in a pipeline: each goes on where it was. Without effect if not
    `active`.
    """

    def __init__(self, device: torch.device, *, active: bool) -> None:
        self.device = device
        self.active = active
        self.start = random_state(device) if active else None
        self.at: dict[int, Tensor] = {}

    def enter(self, index: int) -> Tensor | None:
        """Continue the stream of a micro-batch; returns its state."""
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
        """Inside, draw the same numbers again from `state` on."""
        if state is None:
            yield
            return
        now = random_state(self.device)
        set_random_state(self.device, state)
        try:
            yield
        finally:
            set_random_state(self.device, now)
