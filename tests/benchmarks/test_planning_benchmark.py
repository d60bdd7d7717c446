"""The benchmark of planning: its rows, its targets and its command line, on a small model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.planning.planner import search_plan
from benchmarks import planning
from benchmarks.planned.cases import CASES, IMPORTS, Case, graph_of, request_of
from benchmarks.planning import PHASES, planned, run, verdicts
from benchmarks.searching import models

NOWHERE = Path()
SMALL = Case(name="small", model="llama3_8b", layers=1, batch=8, devices=8)


def test_a_row_says_what_planning_cost_and_what_was_found() -> None:
    row = planned(SMALL, NOWHERE)
    assert tuple(row["phases"]) == PHASES and min(row["phases"].values()) >= 0.0
    assert (
        row["step_s"] > 0.0
        and 0.0 <= row["gap"] < 1.0
        and row["operators"] > 10
        and row["plan_mb"] > 0.0
    )
    assert row["found"]["stages"] == 1 and row["found"]["schedule"] == "none"
    json.dumps(row)


def test_what_is_pinned_is_found() -> None:
    row = planned(
        Case(name="pinned", model="llama3_8b", layers=4, batch=8, devices=8, stages=2, mesh=(2, 2)),
        NOWHERE,
    )
    assert (row["found"]["stages"], row["found"]["mesh"]) == (2, "2x2")
    assert row["found"]["schedule"] != "none" and row["found"]["micro_batches"] > 1


def test_a_share_is_of_the_fastest_plan_s_memory() -> None:
    free, tight = (
        request_of(case, graph_of(case, NOWHERE)) for case in (SMALL, replace(SMALL, share=0.5))
    )
    assert free.memory is None and tight.memory == pytest.approx(
        0.5 * search_plan(graph_of(SMALL, NOWHERE), free).predicted.memory
    )


def test_cases_of_public_models_need_their_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="--models DIR is needed for mamba2-2x2x2"):
        planning.main(["--only", "mamba2-2x2x2", "gpt3-175b"])
    asked: list[str] = []
    monkeypatch.setattr(
        planning,
        "run",
        lambda case, folder: asked.append(case.name) or {"model": case.name, "note": "none"},
    )
    planning.main(["--json"])
    assert asked == [case.name for case in CASES if not case.is_public]


def test_a_model_that_does_not_fit_is_a_note() -> None:
    row = planned(Case(name="large", model="llama3_405b", layers=16, batch=8, devices=1), NOWHERE)
    assert "no plan fits" in row["note"] and "step_s" not in row and "plan" in row["phases"]


@pytest.mark.slow
def test_a_run_is_a_process_of_its_own() -> None:
    row = run(next(case for case in CASES if case.name == "gpt2-small"), None)
    assert row["cpu_s"] > row["plan_s"] > 0.0 and row["peak_gb"] >= row["graph_gb"] > 0.01
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
        assert case.source in IMPORTS
        assert case.source != "shape" or callable(getattr(models, case.model))
        assert case.source != "torch" or case.model in models.CONFIGURATIONS
        assert not case.no_slower or case.no_slower in names
    assert models.moe_1t().experts == 32 and models.llama3_405b().layers == 126


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def told(case: Case, folder: Path | None) -> dict[str, Any]:
        assert folder is None
        asked.append(case.name)
        row = {
            "model": case.name,
            "devices": case.devices,
            "cpu_s": 2.0,
            "peak_gb": 0.1,
            "plan_s": 1.0,
            "phases": {"plan": 1.0},
        }
        return (
            {**row, "note": "no plan fits"}
            if case.name == "moe-1t"
            else {**row, "step_s": 1.0, "gap": 0.1, "found": {"stages": 1}}
        )

    monkeypatch.setattr(planning, "run", told)
    planning.main(["--quick", "--json"])
    written = json.loads(capsys.readouterr().out)
    assert (
        [row["model"] for row in written["rows"]]
        == asked
        == [case.name for case in CASES if case.quick]
    )
    planning.main(["--only", "moe-1t", "llama3-405b"])
    printed = capsys.readouterr().out
    assert "no plan fits" in printed and "llama3-405b: plan_s 1.00, at most 6.00: met" in printed
    assert "moe-1t: plan_s 1.00, at most 8.00: missed" in printed
