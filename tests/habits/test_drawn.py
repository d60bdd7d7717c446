"""Drawn habits are right or refused, few are refused, and a planted fault is noticed."""

from __future__ import annotations

import ast

import pytest
import torch

from autopar.runtime.operators.functions import known_as
from tests.habits.drawn import (
    KINDS,
    MOST_REFUSED,
    TOGETHER,
    Draw,
    drawn,
    is_fault,
    reason,
    verdicts,
)

SEED = 0
FIXED = [range(begin, begin + TOGETHER) for begin in range(0, 40, TOGETHER)]
"""The draws that are always the same, those that the same ranks run together."""


FOUND = ((1, 13), (11, 33), (305, 6))
"""The seeds and numbers of draws that were faults once."""


def _draws(numbers: range) -> list[Draw]:
    return [drawn(SEED, number) for number in numbers]


@pytest.mark.parametrize("numbers", FIXED, ids=lambda numbers: f"{numbers[0]}-{numbers[-1]}")
def test_drawn_habits_are_right_or_refused(numbers: range) -> None:
    told = dict(zip(numbers, verdicts(_draws(numbers)), strict=True))
    assert not {number: said for number, said in told.items() if is_fault(said)}
    refused = sum(said.startswith("refused: ") for said in told.values())
    # A part of few may be above the share that holds for many.
    assert refused <= 2 * MOST_REFUSED * len(told), told


def test_faults_of_once_are_none() -> None:
    told = verdicts([drawn(seed, number) for seed, number in FOUND])
    assert not [said for said in told if is_fault(said)]


def test_a_draw_is_equal_for_equal_numbers_and_python_for_all() -> None:
    texts = [drawn(seed, number).text for seed in range(4) for number in range(100)]
    assert texts[105] == drawn(1, 5).text and len(set(texts)) == len(texts)
    for text in texts:
        ast.parse(text)
    for word in ("MultiheadAttention", "BatchNorm1d", "LSTMCell", "checkpoint", "no_grad"):
        assert any(word in text for text in texts), word
    assert {drawn(0, number).plan for number in range(100)} == set(KINDS)


def test_a_planted_fault_is_noticed() -> None:
    """An operator whose local form is a little off is told, though every script runs to its end."""

    def off(**arguments: object) -> torch.Tensor:
        return torch.ops.aten.embedding.default(**arguments) * 1.001

    draws = _draws(range(2))
    with known_as("aten.embedding.default", off):
        assert all(said.startswith("WRONG: ") for said in verdicts(draws))


def test_refusals_are_counted_by_their_words_alone() -> None:
    one = reason("refused: PlanError: 'a3/norm' takes 4 micro-batches")
    assert one == reason("refused: PlanError: 'a5/norm' takes 2 micro-batches")
    assert is_fault("broken: on one device") and not is_fault("refused: PlanError: no")
