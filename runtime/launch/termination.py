"""SIGTERM to a process with ranks: it is passed on to them, and the process ends as they do."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

TERM_GRACE = 30.0
"""Seconds that ranks may take to end after SIGTERM: longer than `autopar.steps` takes to save."""
OTHERS_STAY = "AUTOPAR_OTHERS_STAY"
"""Environment variable: a file that ranks make if only their machine is taken away."""
ASKED = b"SIGTERM"
"""The message of a caller to the process that has forked its ranks."""


class Ending:
    """The request to ranks to end, and its deadline.

    running: gives the process ids of the ranks to signal.
    """

    def __init__(self, running: Callable[[], list[int]]) -> None:
        self._running = running
        self.deadline = math.inf
        self.asked = False

    def ask(self) -> None:
        """Pass SIGTERM on, once."""
        if not self.asked:
            self.asked = True
            self.deadline = time.monotonic() + TERM_GRACE
            for pid in self._running():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)


@contextlib.contextmanager
def on_sigterm(ask: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM call `ask` instead of killing, inside the block.

    It does nothing where this program handles the signal itself, or in another thread than the main
    one.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: ask())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_by_sigterm(failure: str) -> NoReturn:
    """Say that the ranks did not end in good order, and end as by the signal."""
    print(f"autopar: SIGTERM: {failure}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    raise SystemExit(128 + signal.SIGTERM)
