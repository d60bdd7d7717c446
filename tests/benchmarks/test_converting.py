"""The table of conversions: twenty models, no plan that comes back as another without a word, and
Python that runs and is equal.
"""

from __future__ import annotations

import pytest

from autopar.integrations.convert import TARGETS
from benchmarks.convertible.models import BATCH, MODELS, build
from benchmarks.converting import PLANS, WITHIN, rows, within

pytest.importorskip("transformers")


def test_there_are_twenty_models() -> None:
    assert len(set(MODELS)) == len(MODELS) == 20


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_a_model_gives_a_batch(name: str) -> None:
    module, inputs = build(name)
    assert module.eval()(*inputs).shape[0] == BATCH


@pytest.mark.slow
@pytest.mark.ci
def test_a_model_goes_through_all_targets() -> None:
    actual = list(rows(["llama"], ["tensor", "pipeline"], True))
    assert {row["plan"] for row in actual} == {"tensor", "pipeline"} <= set(PLANS)
    assert all(row["why"] for row in actual if row["outcome"] == "refused")
    assert {row["back"] for row in actual if "back" in row} <= {"same", "named"}
    ran = {row["target"]: row["difference"] for row in actual if "difference" in row}
    assert set(ran) == {"dtensor", "pipelining"} and max(ran.values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_plans_for_a_target_load_or_are_refused_with_a_reason(name: str) -> None:
    assert name in WITHIN and len(set(WITHIN)) == 12
    actual = list(within([name]))
    assert [row["target"] for row in actual] == list(TARGETS)
    assert all(row["why"] for row in actual if row["outcome"] == "refused")
    assert sum(row["outcome"] == "loads" for row in actual) >= 5
