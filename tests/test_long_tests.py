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
    """Setups are shared, so they do not count; names come in their order."""
    path = tmp_path / "long_tests.txt"
    monkeypatch.setattr(long_tests, "PATH", path)
    recorder = long_tests.Recorder()
    for name, when, seconds in (
        ("b", "call", 2.5),
        ("c", "call", 1.9),
        ("d", "setup", 9.0),
        ("a", "call", 2.0),
    ):
        report = SimpleNamespace(nodeid=name, when=when, duration=seconds)
        recorder.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    recorder.pytest_sessionfinish()
    assert path.read_text(encoding="utf-8") == "a\nb\n"
