"""The known schemes beside the plan found: each is the plan that --scheme finds, or says why there
is none.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from report_models import planned

from autopar.analysis.searches.rivals import rivals
from autopar.api import plan_loaded
from autopar.model import LoadedModel
from autopar.report.comparison import compared_json, compared_parts
from autopar.report.tables import show
from autopar.schemes import SCHEMES
from benchmarks.validating.known.transformer import transformer
from tests.benchmarks.known.mixture import MIXTURE


def test_rivals_are_the_plans_of_their_schemes() -> None:
    planned_model = planned(mesh=None)
    told = {
        rival.scheme: rival
        for rival in rivals(planned_model, ("data", "zero3", "megatron"), memory=None)
    }
    assert list(told) == ["data", "zero3", "megatron"]
    for name, rival in told.items():
        pinned = planned(mesh=None, scheme=name).plan.predicted
        assert rival.fits and rival.named == name
        assert (rival.step, rival.memory) == (pinned.step, pinned.memory)
        assert rival.step >= planned_model.plan.predicted.step * (1 - 1e-9)


def test_pins_of_the_schedule_hold_for_schemes() -> None:
    pins = {"micro_batches": 4, "recompute": "full", "schedule": "gpipe"}
    plan = planned(mesh=None, **pins)
    for rival in rivals(plan, ("data", "PP2 x DP2"), memory=None, given=pins):
        beside = planned(mesh=None, scheme=rival.scheme, **pins).plan
        assert (rival.step, rival.memory) == (beside.predicted.step, beside.predicted.memory)
        assert beside.schedule.micro_batches == 4
        assert beside.schedule.pipeline == "gpipe" or not beside.stages


def test_rivals_of_a_target_are_its_plans() -> None:
    graph = transformer(replace(MIXTURE, layers=2), batch=16).graph
    model = LoadedModel(graph=graph, source=graph, dtype="bfloat16")
    asked: dict[str, Any] = {"cluster": "dgx-h100", "devices": 8, "target": "megatron"}
    plan = plan_loaded(model, **asked)
    schemes = ("data 8 (zero1)", "data 2 (zero1) x expert 4 (zero1)", "2d")
    data, expert, grid = rivals(plan, schemes, memory=None)
    for rival in (data, expert):
        beside = plan_loaded(model, scheme=rival.scheme, offload="none", **asked).plan.predicted
        assert (rival.step, rival.memory) == (beside.step, beside.memory)
    assert grid.step is None and grid.why, "no file of Megatron's says it"


def test_what_does_not_fit_is_priced_all_the_same() -> None:
    (rival,) = rivals(planned(), ("data",), memory=1.0)
    assert not rival.fits and rival.step is not None and rival.memory > 1.0


def test_what_is_impossible_says_why() -> None:
    plan = planned()
    told = {rival.scheme: rival for rival in rivals(plan, tuple(SCHEMES), memory=None)}
    assert list(told) == list(SCHEMES)
    assert told["expert"].step is None and told["expert"].why == "the model has no experts"
    assert "64 equal stages" in told["gpt3-64x6x8"].why and told["2d"].step is not None
    rows = json.loads(json.dumps(compared_json(plan, list(told.values()))))["rows"]
    assert [row["scheme"] for row in rows] == ["plan found", *SCHEMES]
    assert (
        rows[0]["ratio"] == 1.0
        and rows[0]["named"]
        and all((row["ratio"] is None) == bool(row["why"]) for row in rows)
    )
    out = io.StringIO()
    show(compared_parts(plan, list(told.values()), "cluster"), out)
    assert (
        "impossible here: " in out.getvalue()
        and "expert (the model has no experts)" in out.getvalue()
    )
    rows = [line for line in out.getvalue().splitlines() if line.startswith("  ")]
    assert not any("gpt3-64x6x8" in row for row in rows)


def test_rows_are_the_same_whatever_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    schemes = ("data", "megatron", "expert", "zero3")
    several = []
    for count in (1, 2):
        monkeypatch.setattr("autopar.forking.cores", lambda count=count: count)
        several.append(rivals(planned(), schemes, memory=None))
    assert several[0] == several[1] and [row.scheme for row in several[0]] == list(schemes)


def test_progress_names_the_schemes_that_are_done() -> None:
    seen: list[tuple[int, int, str]] = []
    rivals(
        planned(),
        ("data", "megatron"),
        memory=None,
        progress=lambda done, of, what: seen.append((done, of, what)),
    )
    assert seen == [(0, 2, "schemes"), (1, 2, "data"), (2, 2, "megatron")]


def test_an_unknown_scheme_is_a_row() -> None:
    (rival,) = rivals(planned(), ("dta",), memory=None)
    assert "unknown scheme 'dta'" in rival.why


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_both_modes(mode: str) -> None:
    assert [rival.named for rival in rivals(planned(mode=mode), ("data",), memory=None)] == ["data"]
