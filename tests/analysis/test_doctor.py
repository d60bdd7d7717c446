"""`autopar doctor`: what it tells of a machine, and how it ends where plans do not run as on one
device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
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
from autopar.runtime.launch import own_command
from autopar.runtime.launch.launchers import LAUNCHERS, MEETING
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
    assert told["versions"]["torch"] == version("torch") and told["devices"][0]["memory"] > 2**28
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
        and "send us the file of autopar doctor --report FILE" in said
    )
    assert "one rank has nobody to talk to" in said


def test_plans_run_by_the_rules_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them with messages of the size that is named."""
    monkeypatch.setattr(doctor, "PLANS", PLANS[:2])
    monkeypatch.setattr(doctor, "MESSAGE", 2**20)
    results = doctor._by_nccls_rules(2, "strict")
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


def test_only_the_large_messages_run_once_more_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_run", lambda name, *rest: name)
    assert doctor._by_nccls_rules(2, "nccl") == ("1f1b, 64 MiB messages, nccl",)


def test_ranks_are_counted() -> None:
    with pytest.raises(UsageError, match="--nproc is 0"):
        run(["doctor", "--nproc", "0"])


def test_a_tool_that_is_missing_or_fails_tells_nothing() -> None:
    assert machine.told_by("no-such-tool-anywhere") == "" == machine.told_by("false")
    assert machine.told_by("echo", "one") == "one"


SECRET = "hf_aSecretThatNobodyMayRead"
"""Put under many names; no report may have it."""


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NCCL_SECRET", "TORCH_TOKEN", "MASTER_ADDR"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setattr("socket.gethostname", lambda: "secret-host")
    monkeypatch.setattr("getpass.getuser", lambda: "alice")


def test_a_report_has_everything_but_secrets(
    secrets: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = RunError("no route from alice@secret-host")

    def broken(*args: Any, **options: Any) -> None:
        raise failing

    monkeypatch.setattr("autopar.runtime.run.run_plan", broken)
    path = tmp_path / "report.json"
    assert run(["doctor", "--quick", "--nproc", "1", "--report", str(path)]) == RunError.exit_code
    text = path.read_text(encoding="utf-8")
    told = json.loads(text)
    assert not told["ok"] and told["parity"][0]["said"] == "no route from USER@HOST"
    assert told["environment"]["NCCL_DEBUG"] == "WARN"
    assert told["environment"]["MASTER_ADDR"] == "set"
    assert told["versions"]["torch"] == version("torch") and told["devices"]
    assert SECRET not in text and "alice" not in text and "secret-host" not in text


def test_a_report_says_why_the_doctor_failed(
    secrets: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RunError("ranks 0, 1 on secret-host use the same device")

    monkeypatch.setattr(doctor, "compared_plans", broken)
    path = tmp_path / "report.json"
    with pytest.raises(RunError):
        run(["doctor", "--quick", "--nproc", "1", "--report", str(path)])
    told = json.loads(path.read_text(encoding="utf-8"))
    assert told["failure"] == "ranks 0, 1 on HOST use the same device" and not told["ok"]


def _machine_with_gpus(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """A machine on which torchrun would start ranks, with a script in torchrun's place."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machine, "devices", lambda: [{"name": "H100", "memory": 80 * 2**30}])
    monkeypatch.setattr(machine, "backends", dict)
    begin = subprocess.Popen
    monkeypatch.setattr(
        own_command.subprocess,
        "Popen",
        lambda command, **options: begin([sys.executable, *words], **options),
    )


@pytest.mark.parametrize("writes", [True, False])
def test_ranks_that_end_without_a_diagnosis_are_reported(
    writes: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "report.json"
    path.write_text("of another day", encoding="utf-8")
    program = "import sys; print('NCCL error: no memory', file=sys.stderr); "
    if writes:
        program += f"open({str(path)!r}, 'w').write('by rank 0'); "
    _machine_with_gpus(monkeypatch, ["-c", f"{program}sys.exit(3)"])
    monkeypatch.setattr("sys.argv", ["autopar", "doctor"])
    assert run(["doctor", "--report", str(path)]) == 3
    assert "NCCL error: no memory" in capsys.readouterr().err
    text = path.read_text(encoding="utf-8")
    if writes:
        assert text == "by rank 0"
    else:
        assert json.loads(text)["failure"] == "exit code 3\nNCCL error: no memory\n"


def test_every_variable_of_a_launcher_is_told_or_named() -> None:
    for row in LAUNCHERS:
        assert {row.rank, row.world, row.local_rank} <= machine.VARIABLES
    assert set(MEETING) <= set(machine.NAMED)
