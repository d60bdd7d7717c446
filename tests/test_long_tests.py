"""The record of long tests: its names are tests, and each is in one part of it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import long_tests
from tests.product_code import ROOT

NAMES = long_tests.PATH.read_text(encoding="utf-8").splitlines()


def test_names_are_tests() -> None:
    assert sorted(set(NAMES)) == NAMES
    for name in NAMES:
        path, function, *_ = name.split("[")[0].split("::")
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), name


def test_every_part_has_some() -> None:
    assert {long_tests.part_of(name) for name in NAMES} == set(range(long_tests.PARTS))


def test_a_record_names_those_that_took_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setup and call count together; names come in their order."""
    path = tmp_path / "long_tests.txt"
    monkeypatch.setattr(long_tests, "PATH", path)
    recorder = long_tests.Recorder()
    for name, seconds in (("b", 1.5), ("c", 1.0), ("a", 2.5), ("b", 0.6)):
        report = SimpleNamespace(nodeid=name, duration=seconds)
        recorder.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    recorder.pytest_sessionfinish()
    assert path.read_text(encoding="utf-8") == "a\nb\n"
