"""Questions of the form "what if": a plan solved again under a change, beside the plan, in Python
and on the command line.
"""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from report_models import perceptrons

from autopar.cli import run
from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.units import parse_rate


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model and its plan."""
    folder = tmp_path_factory.mktemp("made")
    model = str(folder / "model.onnx")
    plan = str(folder / "plan.json")
    onnx.save(perceptrons(2, 256), model)
    run(
        [
            "plan",
            model,
            "--cluster",
            "dgx-h100",
            "--devices",
            "4",
            "--mesh",
            "4",
            "--quiet",
            "--no-compare",
            "-o",
            plan,
        ]
    )
    return model, plan


def test_nothing_changed_is_the_plan(made: tuple[str, str]) -> None:
    plan = Plan.load(made[1])
    actual = plan.what_if(made[0], keep=True)
    assert (
        actual.other.operators == plan.operators
        and actual.other.predicted.step == pytest.approx(plan.predicted.step)
    )
    assert "1.00 times as long" in actual.summary() and "stay as they are" in actual.summary()


def test_slower_links_are_used_less(made: tuple[str, str]) -> None:
    plan = Plan.load(made[1])
    slow = plan.what_if(made[0], links={"nvlink": 1e-4}, keep=True)
    assert slow.other.operators != plan.operators
    sent = [sum(c.nbytes for c in each.collectives) for each in (slow.other, plan)]
    assert sent[0] < sent[1]
    assert slow.asked[0] == "nvlink at 0.0001x" and "0.0001x" in repr(slow)
    fast = plan.what_if(made[0], links={"nvlink": "900GB/s"}, keep=True)
    assert fast.other.predicted.step <= plan.predicted.step * (1 + 1e-9)
    assert "Figures" in str(fast)


def test_strategies_are_forced(made: tuple[str, str]) -> None:
    plan = Plan.load(made[1])
    actual = plan.what_if(made[0], pins=["*/up/*=gpu:n"], keep=True)
    assert all(
        op.strategy == ("n",) for name, op in actual.other.operators.items() if "/up/" in name
    )
    assert actual.other.predicted.step >= plan.provenance.lower_bound


def test_memory_devices_and_batch(made: tuple[str, str]) -> None:
    plan = Plan.load(made[1])
    limit = int(plan.predicted.memory * 0.9)
    assert plan.what_if(made[0], memory=limit).other.predicted.memory <= limit
    assert plan.what_if(made[0], devices=2).other.devices == 2
    assert plan.what_if(made[0], batch=64).other.model.inputs["x"].shape == (64, 256)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"links": {"infiniband": 2}}, "unknown level 'infiniband': valid are nvlink"),
        ({"links": {"nvlink": 0}}, "must be above 0"),
        ({"links": {"nvlink": "fast"}}, "is no speed: give a factor such as 0.5 or 2x"),
        ({"stage": 2}, "unknown argument 'stage'.*Perhaps you meant 'stages'"),
        ({"devices": "8"}, "write devices=8"),
    ],
)
def test_mistakes_are_told(made: tuple[str, str], asked: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Plan.load(made[1]).what_if(made[0], **asked)


def test_a_plan_describes_itself(made: tuple[str, str]) -> None:
    plan = Plan.load(made[1])
    text = plan.summary()
    assert (
        text.startswith("cluster dgx-h100\ntarget autopar: ")
        and "\nmodel perceptrons" in text
        and "step " in text
        and "memory " in text
    )
    evil = plan.model_copy(update={"cluster": "<b>\x1b[2J"})
    assert (
        "<b>" not in evil._repr_html_()
        and "\x1b" not in evil.summary()
        and "<table>" in evil._repr_html_()
    )
    assert len(repr(plan)) < 200


def test_rates() -> None:
    assert (parse_rate("200 GB/s", 1e9, ""), parse_rate("1e-1x", 1.0, "")) == (200.0, 0.1)


def test_the_command(
    made: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, plan = made
    out = tmp_path / "other.json"
    assert (
        run(
            [
                "what-if",
                plan,
                "--model",
                model,
                "--link",
                "nvlink=0.1x",
                "--stages",
                "1",
                "-o",
                str(out),
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert shown.startswith("With nvlink at 0.1x, stages 1, a step takes") and "Figures" in shown
    assert Plan.load(out).cluster
    run(["what-if", plan, "--model", model, "--memory", "1GiB", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["asked"] == ["1GiB of memory"] and printed["after"]["memory"] <= 2**30
    with pytest.raises(UsageError, match="the command reads it"):
        run(["what-if", plan, "--model", model, "-o", plan])
