"""The table of conversions: twenty models, no plan that comes back as another without a word, and
Python that runs and is equal.
"""

from __future__ import annotations

import pytest

from autopar.integrations.convert import TARGETS
from benchmarks.convertible.cells import Cell, cells
from benchmarks.convertible.models import BATCH, MODELS, build
from benchmarks.convertible.page import page
from benchmarks.converting import GIVEN, PLANS, WITHIN, rows

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
def test_plans_for_a_target_are_run_read_or_refused_with_a_reason() -> None:
    assert "vit" in WITHIN and len(set(WITHIN)) == 12
    actual = list(cells(["vit"], GIVEN))
    assert [cell.target for cell in actual] == list(TARGETS)
    outcomes = {cell.target: cell.outcome for cell in actual}
    assert set(outcomes.values()) == {"runs", "same", "refused"}
    assert {target for target, outcome in outcomes.items() if outcome == "refused"} == {
        "torchtitan"
    }
    assert all(cell.why for cell in actual if cell.outcome == "refused")


def test_the_page_tells_outcomes_reasons_and_what_is_left_out() -> None:
    shown = page(
        [
            Cell(model="vit", target="fsdp2", outcome="runs", mesh="data 4", slower=0.25),
            Cell(model="vit", target="torchtitan", outcome="refused", why="no tokens"),
            Cell(model="t5", target="fsdp2", outcome="runs", mesh="shard 4", lost=("one", "two")),
            Cell(model="t5", target="torchtitan", outcome="fails", why="it differs", mesh="data 4"),
        ]
    )
    assert "| ViT | runs: data 4 | refused |" in shown and "| ViT | +25% |  |" in shown
    assert "| T5 | runs: shard 4 | **fails**: data 4 |" in shown
    refused = shown.partition("## Refused or failing")[2].partition("## What files")[0]
    assert "- `torchtitan`: no tokens (ViT)" in refused
    assert shown.endswith("- `fsdp2`: one (T5)\n- `fsdp2`: two (T5)\n")
