"""A progress bar on the terminal for work that takes more than a second."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from autopar.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE = 1.0
"""Seconds of work before a bar appears."""


class ProgressBar:
    """A callback with (done, of, what) that draws a bar on stderr.

    It draws only if `wanted`, and if stderr is a terminal. `word`: what all of the work is.
    """

    def __init__(self, *, wanted: bool = True, word: str = "planning") -> None:
        self.word = word
        self.wanted = wanted and sys.stderr.isatty()
        self.start = time.monotonic()
        self.last: tuple[int, int, str] | None = None
        self.lock = threading.Lock()
        self.alarm = threading.Timer(1.05 * PATIENCE, self._late)
        self.alarm.daemon = True
        self.bar: tuple[Progress, TaskID] | None = None

    def __call__(self, done: int, of: int, what: str) -> None:
        """Draw the progress of the work."""
        with self.lock:
            self.last = done, of, what
            self._draw()

    def _late(self) -> None:
        """Draw the last progress again, for work that says nothing while it takes long."""
        with self.lock:
            self._draw()

    def _draw(self) -> None:
        if self.last is None:
            return
        done, of, what = self.last
        if self.bar is None and self.wanted and time.monotonic() - self.start > PATIENCE:
            from rich.console import Console
            from rich.progress import Progress

            drawn = Progress(console=Console(stderr=True), transient=True)
            drawn.start()
            self.bar = drawn, drawn.add_task(self.word, total=of)
        if self.bar is not None:
            from rich.markup import escape

            drawn, task = self.bar
            drawn.update(
                task,
                completed=done,
                total=of,
                description=escape(f"{self.word} {printable(what, lines=False)}"),
            )

    def __enter__(self) -> ProgressBar:
        if self.wanted:
            self.alarm.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.alarm.cancel()
        with self.lock:
            if self.bar is not None:
                self.bar[0].stop()
            self.wanted = False
