"""Plans priced as another framework would run them, from the search to the page."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from report_models import perceptrons

import autopar
from autopar.analysis.program.step_parts import stepping_of
from autopar.cli import run
from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.plan_origin import cluster_of_plan, model_of_plan
from autopar.sharding.analysis import analyse

OTHER = "megatron@2021"
HABITS = "megatron-2021"
ASKED = ("--cluster", "dgx-h100", "--devices", "4", "--no-compare", "--no-cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("made") / "model.onnx")
    onnx.save(perceptrons(2, 1024), path)
    return path


def planned(model: str, folder: Path, *more: str) -> str:
    """A plan file of the model."""
    path = str(folder / "plan.json")
    run(["plan", model, *ASKED, "--quiet", "-o", path, *more])
    return path


@pytest.mark.parametrize("shape", [("--mesh", "4", "--scheme", "data"), ("--stages", "2")])
def test_what_the_search_prices_is_what_explains_it(
    shape: tuple[str, ...], model: str, tmp_path: Path
) -> None:
    plan = Plan.load(planned(model, tmp_path, "--target", OTHER, *shape))
    assert (plan.target, plan.framework) == (OTHER, HABITS)
    analysis = analyse(model_of_plan(model, plan).graph, train=True)
    steps = {
        name: stepping_of(plan, analysis).seconds(cluster_of_plan(plan, target=name))
        for name in (None, OTHER, "autopar")
    }
    assert steps[None] == steps[OTHER] == pytest.approx(plan.predicted.step, rel=1e-6)
    assert steps["autopar"] != pytest.approx(plan.predicted.step, rel=1e-3)


def test_the_choice_is_said_wherever_it_counts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = planned(model, tmp_path, "--target", OTHER, "--mesh", "4")
    capsys.readouterr()
    run(["explain", path, "--model", model])
    assert f"target {OTHER}: priced by the habits of {HABITS}" in (said := capsys.readouterr().out)
    assert "would run this plan" not in said
    run(["explain", path, "--model", model, "--target", "torchtitan"])
    assert "as torchtitan-2026.03 would run this plan: step" in capsys.readouterr().out
    run(["explain", path, "--model", model, "--target", "autopar", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["framework"] == HABITS and told["repriced"]["framework"] == "autopar"
    run(["plan", model, "--strategy-load", path, "--target", "autopar", "--no-compare"])
    assert "as autopar would run this plan" in capsys.readouterr().out
    page = tmp_path / "page.html"
    run(["report", path, "--model", model, "--target", "autopar", "-o", str(page)])
    text = page.read_text(encoding="utf-8")
    assert f"target {OTHER}" in text and "as autopar would run this plan" in text
    capsys.readouterr()
    run(["plan", model, *ASKED, "--mesh", "4", "--target", "dtensor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["summary"]["framework"] == told["plan"]["framework"] == "neutral"


def test_a_plan_is_made_again_for_another_framework(model: str, tmp_path: Path) -> None:
    plan = Plan.load(planned(model, tmp_path, "--mesh", "4"))
    assert plan.target == plan.framework == "autopar"
    other = plan.what_if(model, target=OTHER)
    assert other.other.framework == HABITS and f"target {OTHER}" in other.asked
    same = other.other.what_if(model).other
    assert (same.target, same.framework) == (OTHER, HABITS), (
        "the plan's own, where none is asked about"
    )


def test_an_unknown_target_or_version_lists_the_valid_ones(model: str) -> None:
    with pytest.raises(UsageError, match=r"unknown target 'nosuch'.*torchtitan"):
        run(["plan", "no-such-model.onnx", "--target", "nosuch"])
    with pytest.raises(UsageError, match=r"version of torchtitan '0\.9'.*valid.* main"):
        autopar.plan(model, target="torchtitan@0.9")


def test_the_option_of_before_says_its_name(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.load(planned(model, tmp_path, "--framework", "megatron", "--mesh", "4"))
    assert plan.target == "megatron"
    assert "--framework is now --target" in capsys.readouterr().err


def test_a_plan_is_written_for_its_target(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = planned(model, tmp_path, "--target", "megatron@2022")
    capsys.readouterr()
    run(["convert", path])
    told = capsys.readouterr()
    assert "--tensor-model-parallel-size" in told.out
    assert "as megatron core reads it, not 2022" in told.err
    assert autopar.convert(path).text == told.out


def test_gradients_travel_as_in_the_framework(model: str, tmp_path: Path) -> None:
    narrow = ("--mesh", "4", "--scheme", "data", "--dtype", "bfloat16")
    plans = {
        name: Plan.load(planned(model, tmp_path, "--target", name, *narrow))
        for name in ("megatron", "megatron-bridge")
    }
    assert {name: plan.schedule.reduce for name, plan in plans.items()} == {
        "megatron": "float32",
        "megatron-bridge": None,
    }
