"""The benchmark of planning: its rows, its targets and its command line, on a small model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks import planning
from benchmarks.planning import CASES, IMPORTS, PHASES, Case, planned, run, verdicts
from benchmarks.searching import models

SMALL = Case(name="small", shape="llama3_8b", layers=1, batch=8, devices=8)


def test_a_row_says_what_planning_cost_and_what_was_found() -> None:
    row = planned(SMALL, "")
    assert tuple(row["phases"]) == PHASES and min(row["phases"].values()) >= 0.0
    assert row["step_s"] > 0.0 and 0.0 <= row["gap"] < 1.0 and row["operators"] > 10 and row["plan_mb"] > 0.0
    assert row["found"]["stages"] == 1 and row["found"]["schedule"] == "none"
    json.dumps(row)


def test_what_is_pinned_is_found() -> None:
    row = planned(Case(name="pinned", shape="llama3_8b", layers=4, batch=8, devices=8, pinned=(2, (2, 2))), "")
    assert (row["found"]["stages"], row["found"]["mesh"]) == (2, "2x2")
    assert row["found"]["schedule"] != "none" and row["found"]["micro_batches"] > 1


def test_a_model_that_does_not_fit_is_a_note() -> None:
    row = planned(Case(name="large", shape="llama3_405b", layers=16, batch=8, devices=1), "")
    assert "no plan fits" in row["note"] and "step_s" not in row and "plan" in row["phases"]


@pytest.mark.slow
def test_a_run_is_a_process_of_its_own() -> None:
    row = run(next(case for case in CASES if case.name == "gpt2-small"))
    assert row["cpu_s"] > row["uncompared_s"] > row["plan_s"] > 0.0 and row["peak_gb"] >= row["graph_gb"] > 0.01
    planning.show_row(row)


@pytest.mark.parametrize(
    ("figures", "met"),
    [
        ({"plan_s": 4.0, "step_s": 6.0}, {"plan_s": True, "step_s": True}),
        ({"plan_s": 6.0, "step_s": 8.0}, {"plan_s": False, "step_s": False}),
        ({"plan_s": 4.0, "note": "no plan fits"}, {"plan_s": False, "step_s": False}),
    ],
)
def test_targets(figures: Mapping[str, Any], met: Mapping[str, bool]) -> None:
    rows = [{"model": "gpt3-175b", **figures}, {"model": "gpt3-175b-64x6x8", "step_s": 7.0}]
    assert {told["figure"]: told["met"] for told in verdicts(rows)} == met


def test_the_cases_name_what_there_is() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert case.source in IMPORTS and (case.source == "onnx" or callable(getattr(models, case.shape)))
        assert not case.no_slower or case.no_slower in names
    assert models.moe_1t().experts == 32 and models.llama3_405b().layers == 126


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def told(case: Case) -> dict[str, Any]:
        asked.append(case.name)
        row = {"model": case.name, "devices": case.devices, "cpu_s": 2.0, "peak_gb": 0.1, "plan_s": 1.0, "phases": {"plan": 1.0}}
        return {**row, "note": "no plan fits"} if case.name == "moe-1t" else {**row, "step_s": 1.0, "gap": 0.1, "found": {"stages": 1}}

    monkeypatch.setattr(planning, "run", told)
    planning.main(["--quick", "--json"])
    written = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in written["rows"]] == asked == [case.name for case in CASES if case.quick]
    planning.main(["--only", "moe-1t", "llama3-405b"])
    printed = capsys.readouterr().out
    assert "no plan fits" in printed and "llama3-405b: plan_s 1.00, at most 10.00: met" in printed
    assert "moe-1t: plan_s 1.00, at most 30.00: missed" in printed
