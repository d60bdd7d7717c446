"""The stalls of a step: all reasons together, for plans with and without stages, and how they are
told.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import onnx
import pytest
from report_models import perceptrons, planned

from autopar.analysis.program.stalls import Stalls, stalls_of
from autopar.api import Planned
from autopar.cli import run
from autopar.costmodel.step.reasons import Reason
from autopar.errors import PlanError, UsageError
from autopar.order.schedules import SCHEDULES
from autopar.report.explain.stalls import MEANINGS, stalls_json, stalls_parts
from autopar.report.tables import Table
from autopar.sharding.analysis import analyse

PLANS: list[dict[str, Any]] = [
    {"scheme": "data", "zero": 0},
    {"scheme": "data", "zero": 1, "micro_batches": 4},
    {"scheme": "data", "zero": 2, "micro_batches": 8},
    {"scheme": "data", "zero": 3, "micro_batches": 2},
    {"scheme": "megatron", "mesh": (2, 2), "zero": 1},
    {"scheme": "megatron", "mesh": (2, 2), "zero": 3, "micro_batches": 2},
    {"scheme": "tensor", "cluster": "dgx-a100"},
    {"scheme": "data", "zero": 1, "cluster": "local-cpu"},
]


def stalls(of: Planned) -> Stalls:
    return stalls_of(of.plan, analyse(of.model.graph, train=True), of.cluster)


def is_whole(told: Stalls) -> None:
    """All reasons and the computation are the step."""
    beside = math.fsum(told.reasons.values())
    assert beside == pytest.approx(told.step - told.computation, abs=1e-12 * told.step)
    assert all(seconds >= -1e-12 * told.step for seconds in told.reasons.values())


@pytest.mark.parametrize("asked", PLANS, ids=str)
def test_the_reasons_are_all_of_a_step_beside_computation(asked: dict[str, Any]) -> None:
    of = planned(4, 256, stages=1, **{"recompute": "none", **asked})
    told = stalls(of)
    is_whole(told)
    assert told.step == pytest.approx(of.plan.predicted.step, rel=1e-12)
    assert told.reasons[Reason.BUBBLE] == told.reasons[Reason.MESSAGES] == 0.0
    assert told.reasons[Reason.UPDATE] == of.plan.predicted.update
    for reason in (Reason.GATHERS, Reason.REDUCTIONS, Reason.VALUES, Reason.END):
        named = math.fsum(one.seconds for one in told.waits if one.reason is reason)
        assert named == pytest.approx(told.reasons[reason], abs=1e-12 * told.step)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_of_stages_they_are_those_of_every_stage(schedule: str) -> None:
    of = planned(8, 64, mesh=None, stages=4, micro_batches=8, schedule=schedule)
    told = stalls(of)
    assert len(told.stages) == 4
    for one in (told, *told.stages):
        is_whole(one)
    assert told.reasons[Reason.BUBBLE] > 0.0
    near = 0.05 if SCHEDULES[schedule].chunks else 1e-9
    assert told.step == pytest.approx(of.plan.predicted.step, rel=near)


def test_stages_that_are_split_tell_values_gathers_and_reductions() -> None:
    """Gathered for every pass, parameters are told apart from the values that a pass sends."""
    once, often = (
        stalls(planned(8, 256, mesh=(2,), stages=2, micro_batches=4, scheme="data", zero=zero))
        for zero in (1, 3)
    )
    for one in (once, often, *once.stages, *often.stages):
        is_whole(one)
    assert often.reasons[Reason.GATHERS] > once.reasons[Reason.GATHERS] > 0.0
    assert often.reasons[Reason.REDUCTIONS] > 0.0
    assert often.reasons[Reason.VALUES] == pytest.approx(once.reasons[Reason.VALUES])


def test_equal_layers_wait_in_one_row() -> None:
    told = stalls(planned(4, 256, stages=1, scheme="tensor", recompute="none", zero=0))
    assert any("{0..3}" in one.name for one in told.waits)
    assert [one.seconds for one in told.waits] == sorted(
        (one.seconds for one in told.waits), reverse=True
    )


def test_every_reason_has_a_meaning() -> None:
    of = planned(4, 256, stages=1, scheme="data", zero=3, micro_batches=2)
    told = stalls(of)
    tables = [part for part in stalls_parts(of.plan, told) if isinstance(part, Table)]
    assert set(MEANINGS) == set(Reason)
    reasons = [row[0] for row in tables[0].rows]
    assert reasons[-1] == "together" and set(reasons[:-1]) <= {reason.value for reason in Reason}
    assert json.loads(json.dumps(stalls_json(told)))["computation"] == told.computation


def test_explain_tells_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "model.onnx")
    plan = str(tmp_path / "plan.json")
    onnx.save(perceptrons(2, 64), model)
    size = ["--cluster", "dgx-h100", "--devices", "4", "--quiet"]
    run(["plan", model, *size, "--mesh", "4", "--scheme", "megatron", "-o", plan, "--no-compare"])
    run(["explain", plan, "--model", model, "--stalls", "--json"])
    told = json.loads(capsys.readouterr().out)["stalls"]
    assert math.fsum(told["reasons"].values()) == pytest.approx(told["step"] - told["computation"])
    assert told["waits"][0]["seconds"] == max(one["seconds"] for one in told["waits"])
    run(["explain", plan, "--model", model, "--stalls"])
    printed = capsys.readouterr().out
    assert "meaning, and what to try" in printed and "The largest waits" in printed
    with pytest.raises(UsageError, match="--stalls needs --model"):
        run(["explain", plan, "--stalls"])
    with pytest.raises(UsageError, match="leave out OP"):
        run(["explain", plan, "layers.0/up/MatMul", "--model", model, "--stalls"])


def test_stages_on_different_meshes_are_refused() -> None:
    of = planned(4, 64, mesh=None, stages=2, micro_batches=2)
    plan = of.plan
    other = plan.stages[1].model_copy(update={"mesh": plan.stages[1].mesh[:0]})
    uneven = plan.model_copy(update={"stages": (plan.stages[0], other)})
    with pytest.raises(PlanError, match="different meshes"):
        stalls_of(uneven, analyse(of.model.graph, train=True), of.cluster)
