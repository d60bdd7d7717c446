"""Tests that take long, by their own record: `make test` leaves them out, and every change is
checked with a part of them.

`long_tests.txt` names them, as `make long-tests` has written it down. They need no mark of their
own, so that a test which becomes quick, or slow, is moved by the next record.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

PATH = Path(__file__).with_name("long_tests.txt")
SECONDS = 2.0
"""What a long test takes at least, on two cores that are both at work."""
PARTS = 4
"""The number of changes in a row that are checked with all slow tests between them."""


def mark(items: list[pytest.Item]) -> None:
    """Mark the tests of the record, as slow ones too."""
    names = frozenset(PATH.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in names:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.long)


def part_of(name: str) -> int:
    """The part to which a test belongs, the same on every machine."""
    return hashlib.sha256(name.encode()).digest()[0] % PARTS


class Recorder:
    """Writes down the tests of a run that took long."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that took long."""
        # A setup is shared: without this test the next one would have it.
        if report.when == "call" and report.duration >= SECONDS:
            self.names.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the record, in the order of the names."""
        PATH.write_text("".join(f"{name}\n" for name in sorted(self.names)), encoding="utf-8")
