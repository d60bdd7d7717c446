"""`autopar doctor`: what it tells of a machine, and how it ends where plans do not run as on one
device.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from autopar.analysis.measurements import doctor, machine
from autopar.analysis.measurements.doctor import PLANS
from autopar.api import plan_loaded
from autopar.cli import run
from autopar.errors import RunError, UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.order.actions import Word
from autopar.order.messages import issued_by
from autopar.order.ranks import rank_order
from autopar.sharding.analysis import analyse


def test_a_machine_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PLANS", PLANS[:2])
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert run(["doctor", "--quick", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and (told["ranks"], told["backend"]) == (2, "gloo")
    assert [(one["plan"], one["ok"]) for one in told["parity"]] == [
        ("one device", True),
        ("data", True),
    ]
    assert told["versions"]["torch"] == torch.__version__ and told["devices"][0]["memory"] > 2**28
    assert told["environment"]["NCCL_DEBUG"] == "WARN"
    assert told["bandwidth_missing"] or {row["collective"] for row in told["bandwidth"]} == {
        "all_reduce"
    }


def test_a_plan_that_differs_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RunError("rank 1 failed:\nTraceback\nOSError: no route")

    monkeypatch.setattr("autopar.runtime.run.run_plan", broken)
    assert run(["doctor", "--nproc", "1", "--quick"]) == RunError.exit_code
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "one device NO" in said
        and "OSError: no route" in said
        and "send back the output of autopar doctor --json" in said
    )
    assert "one rank has nobody to talk to" in said


def test_plans_run_by_the_rules_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them with messages of the size that is named."""
    monkeypatch.setattr(doctor, "PLANS", PLANS[:2])
    monkeypatch.setattr(doctor, "MESSAGE", 2**20)
    results = doctor._by_nccls_rules(2, "gloo")
    assert [(one.plan, one.ok) for one in results] == [
        ("data, strict", True),
        ("1f1b, 1 MiB messages, strict", True),
    ], results
    module, inputs = doctor._wide(2)
    model = load_model(module, ModelOptions(train=True), inputs)
    plan = plan_loaded(model, devices=2, cluster="local-cpu", **doctor.LARGE).plan
    execution = plan.execution(analyse(model.graph, train=True))
    sends = [a for a in rank_order(execution, 0, train=True) if a.word is Word.SEND_FORWARD]
    sizes = [message.nbytes for send in sends for message in issued_by(execution, send, 0)]
    assert sizes == [2**20] * 2


def test_ranks_are_counted() -> None:
    with pytest.raises(UsageError, match="--nproc is 0"):
        run(["doctor", "--nproc", "0"])


def test_a_tool_that_is_missing_or_fails_tells_nothing() -> None:
    assert machine.told_by("no-such-tool-anywhere") == "" == machine.told_by("false")
    assert machine.told_by("echo", "one") == "one"
