"""The benchmark of restrictions: its command line, and that a faster restriction is told."""

from __future__ import annotations

import pytest

from benchmarks import restrictions
from benchmarks.restrictions import Pair


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert restrictions.main(["--only", "llama3-8b-1-4", "--rounds", "1"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("llama3-8b-1-4") and "19 pairs" in first
    assert last.startswith("19 pairs, 0 in which")


def test_a_faster_restriction_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faster = Pair(fewer=(), more=("zero",), step=1.0, restricted=0.99)
    monkeypatch.setattr(restrictions, "pairs", lambda _: [faster])
    assert restrictions.main(["--only", "small-1-2", "--rounds", "1"]) == 1
    told = capsys.readouterr().out
    assert "+1.000% by ('zero',) beside ()" in told and "1 pairs, 1 in which" in told
