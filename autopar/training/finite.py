"""A training whose numbers are no longer finite is stopped before anything of it is saved.

A loss is looked at before its gradients change a parameter, where the host can read it without
waiting for a device, or where bad steps may be left out. Elsewhere losses are read at every report
and save. Parameters are looked at by the save itself.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from autopar.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from .elastic import Training

SHOWN = 8
"""Samples of a batch that a message lists."""


class Finite:
    """The watch over one training; `skips`: how many bad steps may be left out.

    `allowed`: the training goes on from all others.
    """

    def __init__(self, run: Training, skips: int, *, allowed: bool) -> None:
        self.run = run
        self.skips = skips
        self.allowed = allowed
        self.reads = skips > 0 or run.module.engine.device.type == "cpu"
        self._unread: list[tuple[int, str, Tensor]] = []

    def allows(self, loss: Tensor) -> bool:
        """Whether the present step may go on from its loss; False: it is left out.

        Raises `RunError` where no more steps may be left out. Every rank has the same loss.
        """
        if self.allowed and not self.skips:
            return True
        step = self.run.step + 1
        if not self.reads:
            self._unread.append((step, self._samples(), loss.detach()))
            return True
        value = float(loss)
        if math.isfinite(value):
            return True
        if not self.skips:
            raise RunError(self._told(f"the loss of step {step} is {value} ({self._samples()})"))
        self.skips -= 1
        if self._speaks:
            print(
                f"autopar: step {step} is left out: its loss is {value} ({self._samples()}); "
                f"{self.skips} more may be",
                file=sys.stderr,
                flush=True,
            )
        return False

    def require(self) -> None:
        """Raise `RunError` where a loss since the last look is not finite: every rank has it."""
        import torch

        unread = self._unread
        self._unread = []
        if unread:
            # One reading for all steps since the last look.
            finite = torch.stack([loss.reshape(()) for _, _, loss in unread]).isfinite().tolist()
            for (step, samples, loss), good in zip(unread, finite, strict=True):
                if not good:
                    raise RunError(
                        self._told(f"the loss of step {step} is {float(loss)} ({samples})")
                    )

    @property
    def _speaks(self) -> bool:
        import torch.distributed as dist

        return not dist.is_initialized() or dist.get_rank() == 0

    def _samples(self) -> str:
        """The samples of the present batch, in words."""
        sampler = self.run.sampler
        if sampler is None:
            return "no sampler tells its samples"
        taken = sampler.order(sampler.epoch)[sampler.done : sampler.done + sampler.batch]
        more = ", ..." if len(taken) > SHOWN else ""
        return f"epoch {sampler.epoch}, samples {', '.join(map(str, taken[:SHOWN]))}{more}"

    def _told(self, what: str) -> str:
        from autopar.runtime.training.latest import latest_in
        from autopar.runtime.training.saving import finish_saving

        # The save before may be under way still. Every rank stops here, so all of them wait for it.
        finish_saving()
        latest = latest_in(self.run.folder)
        good = "no checkpoint has been saved"
        if latest is not None:
            good = f"the last good checkpoint is {self.run.folder / latest}"
        return (
            f"{what}: the training stops, and nothing of this step is saved; {good}. Look at these "
            "samples, lower the learning rate or set optimizer.clip; training.skip_nonfinite = N "
            "leaves out up to N steps whose loss is not finite"
        )
