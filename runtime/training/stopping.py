"""`steps`: the steps of a training, with an orderly end when the machine is taken back.

The end is a save, a message, and exit code 0. Schedulers of clusters send SIGTERM (Slurm,
Kubernetes, spot machines; torchrun passes it on to its ranks) and kill later. The signal reaches
ranks at different times, so after every step they agree, in one message of four bytes, on whether
one of them has heard it. If one of several machines is taken away, the others are not done: their
ranks save as well, but end with a code at which torchrun restarts the remaining ones.
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
from autopar.runtime.launch import OTHERS_STAY, begin_step, device_of_group, end_steps
from autopar.runtime.ranks.process_groups import host_group

from .saving import finish_saving

GRACE = 25.0
"""Seconds between the signal and the end; Kubernetes gives 30 before it kills, Slurm as many."""
TOO_LATE = 128 + signal.SIGTERM
RESTART = 75
"""The exit code of ranks to be restarted without the lost machine: no failure and not the end."""
BETWEEN_MACHINES = 2.0
"""Seconds within which a signal for all machines reaches the last of them."""


class _Bell:
    """Hears the signal, once, and asks whether others have."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.rung = False
        self.timer: threading.Timer | None = None
        self.group = host_group(device_of_group()) if dist.is_initialized() else None

    def ring(self, number: int, frame: FrameType | None) -> None:
        """Take the signal: from now on the time for the save runs."""
        if not self.rung:
            self.rung = True
            self.timer = threading.Timer(self.grace, self._late)
            # A process that ends in time does not wait for its timer.
            self.timer.daemon = True
            self.timer.start()

    def _late(self) -> None:
        """End the process at once, since the scheduler will kill it any moment."""
        print(
            f"autopar: SIGTERM, and nothing was saved within {self.grace:g} s",
            file=sys.stderr,
            flush=True,
        )
        # Without exit handlers: one of them may wait for a rank that hangs.
        os._exit(TOO_LATE)

    def heard(self) -> bool:
        """Whether some rank has heard the signal; every rank asks at the same point."""
        # Alone, there is nobody to agree with.
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.rung
        rung = torch.tensor([int(self.rung)], dtype=torch.int32)
        # Ranks that stopped in different steps would wait for one another.
        dist.all_reduce(rung, op=dist.ReduceOp.MAX, group=self.group)
        return bool(rung)

    def code(self) -> int:
        """The exit code of this rank after its save; every rank asks at the same point.

        `RESTART` if another machine heard the signal, this one did not, and its launcher may
        restart it.
        """
        machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        own = int(os.environ.get("GROUP_RANK", "0"))
        if machines == 1 or not dist.is_initialized():
            return 0
        # One machine or all of them: that is known when the last signal has had time to come.
        time.sleep(BETWEEN_MACHINES)
        signalled = torch.zeros(machines, dtype=torch.int32)
        signalled[own] = int(self.rung)
        dist.all_reduce(signalled, op=dist.ReduceOp.MAX, group=self.group)
        if bool(signalled.all()):
            return 0
        if signalled[own]:
            # The launcher of this machine reads the file, and leaves without failing the others.
            if place := os.environ.get(OTHERS_STAY):
                Path(place).touch()
            return 0
        allowed = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return RESTART if restarts < allowed else 0


def _tell_end(done: int, code: int) -> None:
    """Print that the training was saved and how it ends; every rank that is restarted says so."""
    if not code and dist.is_initialized() and dist.get_rank() != 0:
        return
    ending = "to be started again without a machine that was taken away" if code else "and ended"
    text = f"autopar: SIGTERM: saved after {done} steps, {ending}"
    print(text, file=sys.stderr, flush=True)


def steps(
    first: int, count: int, on_stop: Callable[[int], object], *, grace: float = GRACE
) -> Iterator[int]:
    """The numbers of the steps from `first`, the number of done steps, to `count`.

        for step in autopar.steps(start, 1000, stop):

    When a rank gets SIGTERM, every rank ends the present step, calls `on_stop(done)` with the
    number of done steps, which must save, prints a message, and ends with exit code 0. (On other
    machines than the lost one it ends with 75, and `torchrun` restarts them without it.) If that
    takes longer than `grace` seconds from the signal, it ends with 143. Saves under way are waited
    for, here and after the last step. If a rank goes missing, the message names the step.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "autopar.steps hears signals, which Python hands to the main thread only: call it there"
        )
    bell = _Bell(grace)
    # Restored behind the last step, so that other code of the program ends as usual.
    before = signal.signal(signal.SIGTERM, bell.ring)
    try:
        for step in range(first, count):
            begin_step(step)
            yield step
            if bell.heard():
                on_stop(step + 1)
                finish_saving()
                code = bell.code()
                _tell_end(step + 1, code)
                raise SystemExit(code)
        finish_saving()
    finally:
        signal.signal(signal.SIGTERM, before)
        if bell.timer is not None:
            bell.timer.cancel()
        end_steps()
