"""Habits of training scripts are right or refused under every plan, or a stated exception."""

from __future__ import annotations

import pytest

from tests.habits.exceptions import EXCEPTIONS, exception_of
from tests.habits.page import is_expected
from tests.habits.table import HABITS
from tests.habits.workshop import MORE_RANKS, PLANS, verdict

PAIRS = [(habit, plan) for plan in PLANS for habit in HABITS]
MENDED = [
    ("clipping, tied weights: clip_grad_norm_(module.parameters())", "1f1b"),
    ("losses: the second output", "data"),
    ("losses: the sum of two outputs", "1f1b"),
    ("weights: p.data = p.data * 0.5", "zero3"),
    ("spectral norm of a layer (parametrizations)", "data"),
    ("hooks: on parameters, before planning", "1f1b"),
    ("buffers: one changed by the script", "data"),
    ("modes: pairs through one norm over batches, trained and evaluated", "data"),
    ("states: torch.save of the whole module", "data"),
    ("attributes: layers appended", "data"),
    ("weights: their number, of those that train, tied", "interleaved"),
    ("groups: no decay for modules by type, as minGPT does", "zero3"),
    ("clipping: module.clip_grad_norm_ of named parameters, 1-norm", "1f1b"),
]
"""Those that once went wrong in silence."""
FAST = [*MENDED, *(pair for pair in PAIRS[5::401] if pair not in MENDED)]
"""A part for every run of the tests, the rest of it spread over all habits and plans."""
ON_MORE_RANKS = [
    (habit, plan, ranks)
    for number, (plan, ranks) in enumerate(MORE_RANKS)
    for habit in list(HABITS)[number::9]
]


@pytest.mark.parametrize(("habit", "plan"), FAST)
def test_some_habits_are_right_or_refused(habit: str, plan: str) -> None:
    told = verdict(HABITS[habit], PLANS[plan])
    assert is_expected(habit, plan, told), told


@pytest.mark.slow
@pytest.mark.parametrize(("habit", "plan"), [pair for pair in PAIRS if pair not in FAST])
def test_all_habits_are_right_or_refused(habit: str, plan: str) -> None:
    told = verdict(HABITS[habit], PLANS[plan])
    assert is_expected(habit, plan, told), told


@pytest.mark.slow
@pytest.mark.parametrize(("habit", "plan", "ranks"), ON_MORE_RANKS)
def test_a_part_is_right_or_refused_on_more_ranks(habit: str, plan: str, ranks: int) -> None:
    told = verdict(HABITS[habit], MORE_RANKS[plan, ranks])
    assert is_expected(habit, plan, told), told


@pytest.mark.parametrize("words", [words for where in EXCEPTIONS.values() for words in where])
def test_every_exception_is_of_a_habit(words: str) -> None:
    assert any(habit.startswith(words) for habit in HABITS)


def test_a_habit_has_one_exception_at_most() -> None:
    assert len(HABITS) >= 200
    for habit, plan in PAIRS:
        texts = [
            text
            for text, where in EXCEPTIONS.items()
            if any(habit.startswith(words) and plan in plans for words, plans in where.items())
        ]
        assert len(texts) <= 1 and (exception_of(habit, plan) is None) == (not texts)


def test_what_is_wrong_is_noticed() -> None:
    """A habit whose ranks see other weights than one device is not called right."""
    import torch

    def halved(workshop: object) -> object:
        module = workshop.start()  # type: ignore[attr-defined]
        if not workshop.alone:  # type: ignore[attr-defined]
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.5)
        return workshop.steps(module)  # type: ignore[attr-defined]

    assert verdict(halved, PLANS["data"]).startswith("WRONG: ")
    assert not is_expected("groups", "data", "WRONG: [0] differs")
    assert not is_expected("groups", "data", "loud: TypeError")
    assert not is_expected("calls: a method of the model (model.logits)", "data", "right")
