"""The benchmark of restrictions: its pairs, its command line, and that a faster one is told."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from benchmarks import restrictions
from benchmarks.restricted.cases import CASES, CASES_BY_NAME
from benchmarks.restrictions import Fixed, Looked, pairs, subsets, told

ZERO = frozenset({("zero", 1)})
BOTH = ZERO | {("stages", 2)}


def test_a_plan_is_compared_with_all_of_fewer_restrictions() -> None:
    steps: Mapping[Fixed, float] = {frozenset(): 1.0, ZERO: 0.9, BOTH: math.inf}
    (pair,) = pairs(steps)
    assert (pair.fewer, pair.more) == (frozenset(), ZERO)
    assert pair.gained == pytest.approx(0.1)
    assert str(pair) == "+10.000% by [zero 1] beside []"


def test_fewer_restrictions_without_a_plan_are_slower_than_any() -> None:
    (pair,) = pairs({frozenset(): math.inf, ZERO: 0.9})
    assert pair.gained == 1.0


def test_all_subsets_of_restrictions_and_their_pairs() -> None:
    every = list(subsets([{"zero": 1}, {"stages": 2}, {"micro_batches": 4}]))
    assert every[0] == frozenset() and len(every) == 8
    assert len(pairs(dict.fromkeys(every, 1.0))) == 19
    assert told(BOTH) == "stages 2, zero 1"


def test_there_are_twenty_cases_of_unlike_names() -> None:
    assert len(CASES) == len(CASES_BY_NAME) == 20
    assert any(case.share for case in CASES) and len({case.model for case in CASES}) > 10


def test_what_is_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked = {
        "bert-8": Looked(case="bert-8", steps={frozenset(): 1.0, ZERO: 0.99}, seconds=1.0),
        "gpt2-8": Looked(case="gpt2-8", steps={frozenset(): 1.0, ZERO: 1.0}, seconds=1.0),
    }
    monkeypatch.setattr(restrictions, "looked_at", lambda case, seeds: looked[case.name])
    assert restrictions.main(["--only", "gpt2-8"]) == 0
    assert restrictions.main(["--only", "gpt2-8", "bert-8"]) == 1
    *_, fine, wrong, pair, last = capsys.readouterr().out.splitlines()
    assert fine.startswith("gpt2-8") and wrong.startswith("bert-8")
    assert pair == "    +1.000% by [zero 1] beside []"
    assert last.startswith("4 searches, 2 pairs, 1 in which")
