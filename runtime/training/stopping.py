"""`steps`: the steps of a training, which end in good order when the machine is wanted back: a save within the grace, a word, exit 0.

Schedulers of clusters send SIGTERM (Slurm, Kubernetes, spot machines; torchrun hands it on to its ranks) and kill later. The signal reaches
ranks at different times, so they agree after every step, in one message of four bytes, on whether one of them has heard it.

Where one of several machines is taken away, the others are not done: their ranks save as well, but end with a code at which torchrun starts
them again, with those that are left.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from autopar.errors import UsageError

from ..launch import OTHERS_STAY, begin_step, end_steps
from .saving import finish_saving

GRACE = 25.0
"""Seconds between the signal and the end; Kubernetes gives 30 before it kills, Slurm as many."""
TOO_LATE = 128 + signal.SIGTERM
AGAIN = 75
"""The exit code of ranks that are to be started again without the machine that was taken away: not a failure, but not the end."""
BETWEEN_MACHINES = 2.0
"""Seconds within which a signal for all machines reaches the last of them."""


class _Bell:
    """Hears the signal, once."""

    def __init__(self, grace: float) -> None:
        self.grace, self.rung = grace, False
        self.timer: threading.Timer | None = None
        # On GPUs a message of the host's own, for which no stream has to be waited for.
        apart = dist.is_initialized() and "gloo" not in dist.get_backend()
        self.group = dist.new_group(backend="gloo") if apart else None

    def ring(self, number: int, frame: FrameType | None) -> None:
        """The signal has come: the time runs."""
        if not self.rung:
            self.rung = True
            self.timer = threading.Timer(self.grace, self._late)
            self.timer.daemon = True
            self.timer.start()

    def _late(self) -> None:
        print(f"autopar: SIGTERM, and nothing was saved within {self.grace:g} s", file=sys.stderr, flush=True)
        os._exit(TOO_LATE)

    def heard(self) -> bool:
        """Whether some rank has heard it; every rank asks at the same point."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.rung
        found = torch.tensor([int(self.rung)], dtype=torch.int32)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def code(self) -> int:
        """With what this rank ends that has saved; every rank asks at the same point.

        `AGAIN` where another machine heard the signal and this one did not, and its launcher may start it again.
        """
        machines, own = int(os.environ.get("GROUP_WORLD_SIZE", "1")), int(os.environ.get("GROUP_RANK", "0"))
        if machines == 1 or not dist.is_initialized():
            return 0
        time.sleep(BETWEEN_MACHINES)
        asked = torch.zeros(machines, dtype=torch.int32)
        asked[own] = int(self.rung)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.group)
        if bool(asked.all()):
            return 0
        if asked[own]:
            if place := os.environ.get(OTHERS_STAY):
                Path(place).touch()
            return 0
        left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return AGAIN if left > 0 else 0


def steps(first: int, count: int, on_stop: Callable[[int], object], *, grace: float = GRACE) -> Iterator[int]:
    """The numbers of the steps from `first`, the number of those that are done, to `count`: `for step in autopar.steps(start, 1000, stop)`.

    When a rank is sent SIGTERM, every rank ends the step at hand, calls `on_stop(done)` with the number of steps that are done, which is to
    save, says so, and ends with exit code 0 (with 75 on other machines than the one that is taken away, which `torchrun` starts again
    without it). What takes longer than `grace` seconds from the signal ends with 143. Saves that are under way are waited for, here and
    after the last step. Where a rank goes missing, the message names the step (see `launch.begin_step`).
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("autopar.steps hears signals, which Python hands to the main thread only: call it there")
    bell = _Bell(grace)
    before = signal.signal(signal.SIGTERM, bell.ring)
    try:
        for step in range(first, count):
            begin_step(step)
            yield step
            if bell.heard():
                on_stop(step + 1)
                finish_saving()
                code = bell.code()
                if code or not dist.is_initialized() or dist.get_rank() == 0:
                    what = "to be started again without a machine that was taken away" if code else "and ended"
                    print(f"autopar: SIGTERM: saved after {step + 1} steps, {what}", file=sys.stderr, flush=True)
                raise SystemExit(code)
        finish_saving()
    finally:
        signal.signal(signal.SIGTERM, before)
        if bell.timer is not None:
            bell.timer.cancel()
        end_steps()
