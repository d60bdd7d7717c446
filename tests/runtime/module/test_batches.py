"""Batches are compared in the first calls and some later ones, evaluation apart from training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.runtime.module import batches
from autopar.runtime.module.batches import EVERY, FIRST, Batches

CPU = torch.device("cpu")


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls that were compared, by the number that they were given."""
    seen: list[int] = []
    monkeypatch.setattr(batches, "agree", lambda told, **options: None)

    def checksum(values: Any, *, whole: bool) -> bytes:
        seen.append(int(next(iter(values))))
        return b""

    monkeypatch.setattr(batches, "checksum", checksum)
    return seen


def _calls(checked: Batches, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        checked.agreed(lambda number=number: {"x": torch.tensor(number)}, CPU)  # type: ignore[misc]


def test_a_sample_is_compared_for_ever(compared: list[int]) -> None:
    _calls(Batches(debug=False), 3 * EVERY)
    assert compared == [*range(FIRST), EVERY, 2 * EVERY]


def test_with_debug_all_are(compared: list[int]) -> None:
    _calls(Batches(debug=True), 9)
    assert compared == list(range(9))


def test_an_evaluation_does_not_use_up_what_training_needs(compared: list[int]) -> None:
    checked = Batches(debug=False)
    with torch.no_grad():
        _calls(checked, 9, first=1000)
    _calls(checked, 9)
    assert compared == [*range(1000, 1000 + FIRST), *range(FIRST)]
