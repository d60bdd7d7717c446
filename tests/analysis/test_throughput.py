"""Speed and cost of a plan: tokens, MFU and device hours by hand, in text and as values."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from report_models import perceptrons, planned

from autopar.analysis.program.throughput import Budget, cost_of, throughput_of
from autopar.cli import run
from autopar.errors import UsageError
from autopar.plan_parts import InputSpec
from autopar.report.throughput import batch_line, speed_json, speed_lines, warning_lines

TOKENS = {"input_ids": InputSpec(shape=(4, 32), dtype="int64")}


def test_speed_is_of_all_devices_that_are_paid_for() -> None:
    planned_model = planned(scheme="data")
    plan = planned_model.plan
    speed = throughput_of(plan, planned_model.cluster)
    # Two layers of 16 x 64 and 64 x 16 on 32 rows. The input has no gradient.
    assert speed.flops == 2 * 32 * 16 * 64 * (4 * 3 - 1)
    assert (speed.samples, speed.tokens, speed.devices) == (32, 0, 4)
    peak = planned_model.cluster.device.flops("float32")
    assert speed.mfu == pytest.approx(speed.flops / (4 * plan.predicted.step * peak))
    idle = throughput_of(plan.model_copy(update={"unused": 4}), planned_model.cluster)
    assert idle.flops_per_device == pytest.approx(speed.flops_per_device / 2)
    assert throughput_of(plan).mfu is None


def test_a_run_has_steps_and_hours() -> None:
    plan = planned(scheme="data").plan
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"inputs": TOKENS})})
    speed = throughput_of(plan, step=3.6)
    cost = cost_of(speed, Budget(tokens=128e6, price=2.5))
    assert (cost.steps, cost.seconds) == (1e6, 3.6e6)
    assert cost.device_hours == pytest.approx(4000) and cost.money == pytest.approx(10000)
    assert (
        batch_line(plan) == "batch 4 sequences of 32 tokens, 128 tokens a step (input_ids 4 x 32)"
    )
    assert warning_lines(plan) == []
    (line,) = warning_lines(plan.model_copy(update={"unused": 4}))
    assert "batch of 4 is smaller than the 8 devices" in line
    told = speed_json(plan, None, Budget(tokens=1e12))["run"]
    assert told["tokens"] == 1e12 and told["money"] is None
    line = speed_lines(plan, None, Budget(tokens=1e12, price=2.0))[1]
    assert line.startswith("run 1.000 trillion tokens take 7,812,500,000 steps")
    assert "GPU hours on 4 GPUs: " in line and line.endswith("at 2 a GPU and hour")


def test_tokens_of_what_has_none_are_refused() -> None:
    with pytest.raises(UsageError, match="no sequences of tokens"):
        cost_of(throughput_of(planned(scheme="data").plan), Budget(tokens=1e9))


@pytest.mark.parametrize("text", ["many", "-1", "0", "1X"])
def test_what_is_no_count(text: str, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    onnx.save(perceptrons(), str(model))
    with pytest.raises(UsageError, match="--tokens"):
        run(["plan", str(model), "--devices", "2", f"--tokens={text}"])


def test_the_command_line_prices_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "model.onnx")
    onnx.save(perceptrons(), model)
    asked = [model, "--devices", "2", "--cluster", "dgx-h100", "--price", "2.5"]
    run(["plan", *asked, "--json"])
    told = json.loads(capsys.readouterr().out)["summary"]
    assert told["run"]["money"] == pytest.approx(2.5 * 2 * told["step"] / 3600)
    assert 0 < told["mfu"] < 1 and told["recipe"] is not None
    run(["compare", *asked, "--scheme", "DDP"])
    shown = capsys.readouterr().out
    assert "GPU hours" in shown and "DDP" in shown
