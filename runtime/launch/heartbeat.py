"""Ranks of `torchrun` watch one another while they train, by signs of life in the store.

If a rank is stopped, or its machine is gone, the others wait in a collective until its timeout, and
none can name it. So a thread of every rank counts seconds in the store, and reads the count of the
next rank. If that has stood still for `SILENCE` seconds, it reports this and ends its process, and
the launcher ends or restarts all others.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from .rank_process import BEAT, at_first_step, current_step

SILENCE = 60.0
"""Seconds without a sign of life after which a rank is given up."""
LATE = 71
"""The exit code of a rank that gives another up."""
_DONE = "done"
_LAST_LOOK = 10.0
"""Seconds that a process which ends waits for its thread: the store may hang with its machine."""


def watch_in_steps(
    store: Store, rank: int, world: int, give_up: Callable[[], None] | None = None
) -> None:
    """Watch the next rank from the first step on.

    `store`: this thread's own, so that nobody else waits on its connection. `give_up`: called
    before this process ends because of another.
    """
    watch = _Watch(store, rank, (rank + 1) % world, give_up)
    at_first_step(watch.begin)


class _Watch:
    """A thread that gives this rank's signs of life and looks for the next rank's."""

    def __init__(
        self, store: Store, rank: int, other: int, give_up: Callable[[], None] | None
    ) -> None:
        self.store = store
        self.rank = rank
        self.other = other
        self.give_up = give_up
        self.count = 0
        self.silent = 0.0
        self.seen = ""
        # Set by the exit handler, while the thread sleeps.
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="autopar-watch", daemon=True)

    def begin(self) -> None:
        """Start the thread; it ends with the process."""
        self.thread.start()
        atexit.register(self._end)

    def _run(self) -> None:
        """Beat and look, until the process ends."""
        # An error means that the store has ended: so will all ranks.
        with contextlib.suppress(RuntimeError):
            while not self.ended.is_set():
                self._beat()
                began = time.monotonic()
                self.ended.wait(BEAT)
                # While this process was stopped it could not look: however long that was, it counts
                # as little.
                self._look(min(time.monotonic() - began, 2 * BEAT))

    def _beat(self, word: str = "") -> None:
        """Give a sign of life, or say a word."""
        self.count += 1
        self.store.set(f"beat {self.rank}", word or str(self.count))

    def _look(self, seconds: float) -> None:
        """Look for a sign of life of the next rank, after some seconds."""
        key = f"beat {self.other}"
        if self.ended.is_set() or not self.store.check([key]):
            # The other rank is not in its first step yet.
            return
        count = self.store.get(key).decode()
        self.silent = 0.0 if count != self.seen or count == _DONE else self.silent + seconds
        self.seen = count
        if self.silent > SILENCE:
            where = "" if current_step() is None else f" in step {current_step()}"
            text = (
                f"autopar: rank {self.other} has not been heard of for {SILENCE:g} s,"
                f" and rank {self.rank} waits for it{where}"
            )
            print(text, file=sys.stderr, flush=True)
            if self.give_up is not None:
                self.give_up()
            # The main thread waits in a collective, where no exception reaches it.
            os._exit(LATE)

    def _end(self) -> None:
        """Tell the others that this rank is through."""
        self.ended.set()
        # A thread that comes back from the store while the interpreter ends is unwound through
        # torch's C++, which aborts the process.
        self.thread.join(_LAST_LOOK)
        with contextlib.suppress(RuntimeError):
            self._beat(_DONE)
