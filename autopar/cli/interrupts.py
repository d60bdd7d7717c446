"""Ctrl-C during a search: the first ends the search, the second the program.

After the first the best plan so far is kept.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""The exit code of a program ended by Ctrl-C."""


class Interrupts:
    """A count of Ctrl-C."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: a search catches the first exception, and may take long to end."""
        self.count += 1
        if self.count > 1:
            # `print` may be what the signal interrupted, and cannot be entered twice. An exception
            # could be caught again, and threads could hold up an ordinary exit.
            os.write(2, b"autopar: interrupted\n")
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt


@contextmanager
def counted() -> Iterator[Interrupts]:
    """Count Ctrl-C inside.

    Nothing changes if the program ignores it, or outside the main thread.
    """
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or before is not signal.default_int_handler
    ):
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def say_interrupted(saved: str | None) -> None:
    """Print the result of an interrupted search."""
    outcome = (
        f"the best plan so far is saved to {saved}"
        if saved
        else "the best plan so far is not saved (-o FILE keeps it)"
    )
    print(f"autopar: interrupted: {outcome}", file=sys.stderr)
