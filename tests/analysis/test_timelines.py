"""The predicted timeline as a file: from `autopar plan` and `autopar explain`, and what keeps it
from being written.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest
from report_models import perceptrons

from autopar.api import plan_loaded
from autopar.cli import run
from autopar.errors import PlanError, UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.order.actions import Word
from autopar.order.schedules import SCHEDULES
from autopar.plan import Plan
from autopar.report.tables import summary_lines
from autopar.report.traces import write_trace
from autopar.units import seconds_text

FOUR = ("--cluster", "dgx-h100", "--devices", "4", "--mesh", "4", "--scheme", "tensor")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.onnx"
    onnx.save(perceptrons(), path)
    return str(path)


def events(path: Path) -> list[dict[str, Any]]:
    """The complete events of a trace."""
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_plan_and_explain_write_the_timeline_of_the_predicted_step(
    model: str, tmp_path: Path
) -> None:
    plan, first, second = (tmp_path / name for name in ("plan.json", "first.json", "second.json"))
    run(["plan", model, *FOUR, "-o", str(plan), "--trace", str(first), "--quiet"])
    run(["explain", str(plan), "--model", model, "--trace", str(second)])
    assert first.read_bytes() == second.read_bytes()
    actual = events(first)
    predicted = Plan.load(plan)
    assert max(e["ts"] + e["dur"] for e in actual) == pytest.approx(
        predicted.predicted.step * 1e6, rel=1e-9
    )
    collectives = [e for e in actual if e["tid"] != 0]
    assert sorted(e["args"]["kind"] for e in collectives) == sorted(
        c.kind for c in predicted.collectives
    )
    for thread in {e["tid"] for e in actual}:
        for before, after in pairwise([e for e in actual if e["tid"] == thread]):
            assert before["ts"] + before["dur"] <= after["ts"] * (1 + 1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_pipeline_of_a_plan_is_drawn_and_ends_with_its_step(
    schedule: str, tmp_path: Path
) -> None:
    """A process for each stage with its own passes and messages, one after the other; then the
    update.
    """
    model, file, path = (str(tmp_path / name) for name in ("model.onnx", "plan.json", "trace.json"))
    onnx.save(perceptrons(8, 64), model)
    run(
        [
            "plan",
            model,
            *FOUR[:4],
            "--stages",
            "4",
            "--micro-batches",
            "8",
            "--schedule",
            schedule,
            "-o",
            file,
            "--trace",
            path,
            "--quiet",
        ]
    )
    drawn = events(Path(path))
    plan = Plan.load(file)
    assert plan.schedule.pipeline == schedule
    row = SCHEDULES[schedule]
    chunks = plan.schedule.interleave
    near = (
        0.05 if row.chunks else 1e-9
    )  # the closed form of chunks is exact for short messages only
    assert max(e["ts"] + e["dur"] for e in drawn) == pytest.approx(
        plan.predicted.step * 1e6, rel=near
    )
    for stage in range(4):
        mine = [e for e in drawn if (e["pid"], e["tid"]) == (stage, 0)]
        assert (
            len(mine) == 8 * chunks * (3 if row.splits else 2) + 1 and mine[-1]["name"] == "update"
        )
        # Both passes of a merged pair are drawn, the forward pass first.
        order = row.order(stage, 4, 8, chunks)
        passes = [a for each in order for a in (each if isinstance(each, tuple) else (each,))]
        assert [e["args"]["kind"][0] for e in mine[:-1]] == [
            "f" if a.word is Word.FORWARD else "b" for a in passes
        ]
        for before, after in pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] * (1 + 1e-12)
    messages = [e for e in drawn if e["tid"] != 0]
    assert len(messages) == 2 * 8 * (4 * chunks - 1)


def test_a_pipeline_whose_stages_begin_elsewhere_is_not_drawn(tmp_path: Path) -> None:
    planned_model = plan_loaded(
        load_model(perceptrons(4, 64), ModelOptions()), cluster="dgx-h100", devices=2, stages=2
    )
    other = planned_model.plan.model_copy(update={"stages": planned_model.plan.stages[::-1]})
    with pytest.raises(PlanError, match="not the model's order"):
        write_trace(
            tmp_path / "trace.json", other, planned_model.model.graph, planned_model.cluster
        )


def test_a_plan_tells_how_much_communication_is_hidden() -> None:
    """Four weights of 16 MiB are four buckets, of which all but the last are summed under the rest
    of the backward pass.
    """
    loaded = load_model(perceptrons(2, 1024), ModelOptions())
    planned_one = plan_loaded(
        loaded, cluster="dgx-h100", devices=4, mesh=(4,), scheme="data", pins=("*MatMul=gpu:m",)
    ).plan
    parts = planned_one.predicted
    assert 0.0 < parts.overlapped < parts.communication
    assert parts.step == pytest.approx(
        parts.forward + parts.backward + parts.update + parts.communication - parts.overlapped,
        rel=1e-12,
    )
    (line,) = (line for line in summary_lines(planned_one, "cluster") if line.startswith("step"))
    assert line.endswith(f"of which {seconds_text(parts.overlapped)} hidden under computation")


def test_a_trace_that_cannot_be_made_is_refused_before_the_work(model: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        run(["plan", "absent.onnx", *FOUR, "--trace", str(tmp_path / "absent" / "trace.json")])
    plan = tmp_path / "plan.json"
    run(["plan", model, *FOUR, "-o", str(plan), "--quiet"])
    with pytest.raises(UsageError, match="--trace needs --model"):
        run(["explain", str(plan), "--trace", str(tmp_path / "trace.json")])
