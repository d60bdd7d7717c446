"""Where the seconds of a step go: every action of the order is named, parts add up, and a trace is
written.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cli import run
from autopar.errors import RunError, UsageError
from autopar.order.actions import Word
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.profiling.predictions import foretold
from autopar.runtime.profiling.profile import BETWEEN, MEMORY, MESSAGES, kind_of_event, word_of
from autopar.runtime.profiling.rows import Row, together, words_of
from tests.runtime.deep import STAGED, Deep

STEPS = 3
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return self.up(x).square().mean()

def net():
    return Net(), (torch.ones(4, 8),)
"""


class Net(nn.Module):
    """Two products and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.down(torch.relu(self.up(x))).square().mean()


SCHEMES: dict[str, dict[str, Any]] = {
    "zero3": {"scheme": "zero3"},
    "stages": {"stages": 2, "micro_batches": 2, "schedule": "1f1b"},
}


@functools.cache
def plan_of(scheme: str) -> Plan:
    return autopar.plan(
        Net(), (torch.ones(8, 16),), devices=2, cluster="local-cpu", **SCHEMES[scheme]
    )


def _profiled(scheme: str, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = autopar.parallelize(Net(), plan_of(scheme))
    optimizer = torch.optim.AdamW(module.parameters())
    module.train_step(torch.ones(8, 16), optimizer)
    with autopar.profile(module) as profile:
        for _ in range(STEPS):
            module.train_step(torch.ones(8, 16), optimizer)
    profile.save_trace(Path(folder) / f"{torch.distributed.get_rank()}.json")
    return profile.json()


@pytest.mark.gloo
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_in_parts(tmp_path: Path, scheme: str) -> None:
    plan_of(scheme)
    ranks = run_ranks(_profiled, 2, scheme, str(tmp_path))
    assert max(told["kinds"].get("products", 0.0) for told in ranks) > 0  # a stage may be without
    for rank, told in enumerate(ranks):
        assert len(told["steps"]) == STEPS and all(seconds > 0 for seconds in told["steps"])
        parts = {part["part"]: part["measured"] for part in told["parts"]}
        words = {word_of(action) for action in told["actions"]}
        assert {Word.FORWARD, Word.BACKWARD} <= words and (Word.GATHER in words) == (
            scheme == "zero3"
        )
        assert bool({Word.SEND_FORWARD, Word.RECEIVE_FORWARD} & words) == (scheme == "stages")
        inside = [
            seconds
            for name, seconds in parts.items()
            if name not in ("step", "collectives") and not name.startswith("memory")
        ]
        assert sum(inside) >= 0.9 * parts["step"] and parts["forward"] > 0 and parts["update"] > 0
        assert len(told["deviations"]) == 3 and parts["memory beside parameters and optimizer"] > 0
        assert (told["rank"], told["stage"]) == (rank, rank if scheme == "stages" else None)
        assert (told["kinds"].get(MESSAGES, 0.0) > 0) == (scheme == "stages")
        named = {
            event["name"]
            for event in json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))[
                "traceEvents"
            ]
        }
        assert {f"autopar:{action}" for action in told["actions"]} <= named


@pytest.mark.parametrize("kind", STAGED)
def test_what_is_foretold_of_stages(kind: str) -> None:
    """Each stage has its own; together with what is waited for, each fills the step, and the
    slowest has the plan's figures.
    """
    plan = autopar.plan(Deep(16), (torch.ones(16, 16),), cluster="local-cpu", **STAGED[kind])
    figures = plan.predicted
    stages = [foretold(plan, stage) for stage in range(2)]
    (slowest,) = (own for own in stages if own.update is not None)
    assert slowest.forward == pytest.approx(figures.forward) and slowest.backward == pytest.approx(
        figures.backward
    )
    assert slowest.waiting == pytest.approx(figures.bubble, abs=1e-9)
    assert slowest.collectives == pytest.approx(figures.communication - figures.overlapped)
    for own in stages:
        assert own.waiting is not None and own.step == figures.step and own.beside is None
        assert (
            own.forward + own.backward + own.collectives + own.waiting + figures.update
            == pytest.approx(figures.step)
        )
    assert max(own.memory for own in stages) == pytest.approx(figures.memory)


def test_the_plan_as_a_whole_is_foretold_of_every_rank() -> None:
    plan = plan_of("zero3")
    actual = foretold(plan, None)
    assert (actual.update, actual.memory, actual.waiting) == (
        plan.predicted.update,
        plan.predicted.memory,
        None,
    )
    assert actual.beside is not None and 0 < actual.beside < actual.memory


def test_stages_together() -> None:
    """Deviations are those of all stages, the largest first."""
    named = ("step", 9.0, "s"), ("forward", 2.0, "s"), ("forward", 5.0, "s"), (MEMORY, 9.0, "B")
    rows = [
        {"part": part, "measured": measured, "predicted": 1.0, "unit": unit}
        for part, measured, unit in named
    ]
    parts = [rows[:2], rows[2:]]
    actual = together([{"stage": stage, "parts": rows} for stage, rows in enumerate(parts)])
    assert actual is not None and len(actual["stages"]) == 2 and actual["parts"] == parts[0]
    assert [said.split(" takes ")[0] for said in actual["deviations"]] == [
        "stage 1: forward",
        "stage 0: forward",
    ]
    assert together([]) is None and together([{"stage": None}]) == {"stage": None}


def _without_steps() -> str:
    module = autopar.parallelize(Net(), plan_of("zero3"))
    with pytest.raises(RunError) as raised, autopar.profile(module):
        torch.ones(1).sum()
    with pytest.raises(ZeroDivisionError), autopar.profile(module):
        raise ZeroDivisionError
    return str(raised.value)


def test_nothing_to_measure() -> None:
    plan_of("zero3")
    assert run_ranks(_without_steps, 2) == ["no step of the module ran while it was profiled"] * 2


def _idle() -> list[str]:
    module = autopar.parallelize(Net(), autopar.Plan.load("plan.json"))
    optimizer = torch.optim.AdamW(module.parameters())
    with autopar.profile(module) as profile:
        module.train_step(torch.ones(8, 16), optimizer)
    return [row.part for row in profile.rows]


def test_an_idle_rank_has_nothing_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    autopar.plan(Net(), (torch.ones(8, 16),), devices=1, cluster="local-cpu").save("plan.json")
    busy, idle = run_ranks(_idle, 2)
    assert "forward" in busy and idle == []


def test_words_and_kinds() -> None:
    assert [
        word_of(text)
        for text in ("0F1.2", "3UNSHARD.0", "0REDUCE_GRAD1", "0RECV_B1>2", "1B0.0", "0W1")
    ] == [
        Word.FORWARD,
        Word.GATHER,
        Word.REDUCE,
        Word.RECEIVE_BACKWARD,
        Word.BACKWARD,
        Word.BACKWARD_WEIGHT,
    ]
    assert [
        kind_of_event(name)
        for name in ("aten::addmm", "gloo:all_reduce", "aten::add", "Optimizer.step#AdamW.step")
    ] == ["products", "collectives", "elementwise and others", "update"]
    assert (
        kind_of_event("ncclDevKernel_SendRecv") == "collectives"
        and kind_of_event("ncclDevKernel_SendRecv", staged=True) == MESSAGES
    )
    assert kind_of_event("gloo:recv", staged=True) == MESSAGES
    assert words_of(Row(part="update", measured=0.003, predicted=0.001)) == (
        "update takes 2 ms more than predicted: 3 ms, 3 times the predicted"
    )


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "profiled_model.py").write_text(MODEL, encoding="utf-8")
    run(
        [
            "plan",
            "profiled_model:net",
            "--devices",
            "2",
            "--cluster",
            "local-cpu",
            "--scheme",
            "data",
            "-o",
            "plan.json",
            "--quiet",
        ]
    )
    own = ["run", "plan.json", "--model", "profiled_model:net", "--profile", "trace.json"]
    run([*own, "--steps", "3"])
    said = " ".join(capsys.readouterr().out.split())
    assert "A step of rank 0" in said and "0F0.0" in said and "than predicted" in said
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    run([*own, "--steps", "2", "--json"])
    assert len(json.loads(capsys.readouterr().out)["profile"]["steps"]) == 1
    for wrong in (["--steps", "1"], ["--steps", "3", "--check"]):
        with pytest.raises(UsageError, match="--profile measures the steps after the first"):
            run([*own, *wrong])


def test_the_command_on_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stage is measured by its first rank, each with a trace of its own, and all of them
    scale the cluster.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "staged_model.py").write_text(
        MODEL.replace("(8, 8)", "(1024, 1024)")
        .replace("ones(4, 8)", "ones(64, 1024)")
        .replace("self.up(x)", "torch.relu(self.down(torch.relu(self.up(x))))")
        .replace("self.up = nn", "self.down = nn.Linear(1024, 1024)\n        self.up = nn"),
        encoding="utf-8",
    )
    ask = [
        "plan",
        "staged_model:net",
        "--devices",
        "2",
        "--cluster",
        "local-cpu",
        "--stages",
        "2",
        "--micro-batches",
        "2",
    ]
    run([*ask, "-o", "plan.json", "--quiet"])
    own = [
        "run",
        "plan.json",
        "--model",
        "staged_model:net",
        "--profile",
        "trace.json",
        "--steps",
        "4",
    ]
    capsys.readouterr()
    run([*own, "--recalibrate", "here.json", "--json"])
    told = json.loads(capsys.readouterr().out)
    stages = told["profile"]["stages"]
    assert [(one["rank"], one["stage"]) for one in stages] == [(0, 0), (1, 1)] and told[
        "recalibrated"
    ]["scaled"]
    for one, trace in zip(stages, ("trace.json", "trace-stage-1.json"), strict=True):
        parts = {part["part"]: part for part in one["parts"]}
        assert (
            parts[BETWEEN]["predicted"] is not None
            and parts["forward"]["measured"] > 0
            and parts[MEMORY]["predicted"] > 0
        )
        named = {
            event["name"]
            for event in json.loads((tmp_path / trace).read_text(encoding="utf-8"))["traceEvents"]
        }
        assert {f"autopar:{action}" for action in one["actions"]} <= named
    run(own)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "The stages, of each its first rank" in said
        and "1 predicted" in said
        and "messages between stages" in said
    )
