"""How many of the table's rules are found by execution when the table does not hold them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from autopar.runtime.discovery import discover, on_trial
from autopar.runtime.proof import Sample, decisions
from autopar.sharding.layout import Layout
from autopar.sharding.rules import RULES
from tests.sharding.samples import FAMILIES

SHARE = 0.9
COUNTED = ("unary", "binary", "products", "normal", "reductions")
SAMPLES = 16
"""How many samples of each family are drawn."""

Options = set[tuple[tuple[Layout, ...], tuple[Layout, ...]]]


def options(case: Sample) -> Options:
    """The choices of an operator on two devices without communication inside itself: the layouts of
    its inputs and outputs.
    """
    return {
        (d.inputs, d.outputs)
        for d in decisions(case, (2,))
        if all(option.communication is None for option in d.options)
    }


def drawn(family: str) -> Iterator[Sample]:
    """A seeded choice of a family's samples."""
    cases = list(FAMILIES[family]())
    yield from random.Random(family).sample(cases, min(SAMPLES, len(cases)))


def is_found(case: Sample, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether all options of the table's rule are found without it; what is found beyond them was
    proven.
    """
    wanted = options(case)
    with monkeypatch.context() as hidden:
        hidden.delitem(RULES, case.kind)
        actual = discover(case)
    with on_trial(case.kind, actual.entry):
        return options(case) >= wanted


@pytest.mark.slow
@pytest.mark.ci
def test_most_rules_are_found_by_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {
        str(case): is_found(case, monkeypatch) for family in COUNTED for case in drawn(family)
    }
    missed = [name for name, discovered in results.items() if not discovered]
    assert len(results) > 72 and len(results) - len(missed) >= SHARE * len(results), missed
