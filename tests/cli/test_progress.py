"""The progress bar: it comes by itself for work that says nothing while it takes long."""

from __future__ import annotations

import io
import sys
import time

import pytest

from autopar.cli import progress
from autopar.cli.progress import ProgressBar


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("seconds", "drawn"), [(1.0, True), (0.0, False)])
def test_a_bar_comes_after_its_patience(
    seconds: float, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "PATIENCE", 0.05 if drawn else 60.0)
    with ProgressBar(word="report:") as bar:
        bar(0, 2, "the model is read")
        end = time.monotonic() + 30 * seconds
        while bar.bar is None and time.monotonic() < end:
            time.sleep(0.01)
        assert (bar.bar is not None) == drawn
