"""Where the seconds of a step go: every action of the order is named, parts add up, and a trace is written."""

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
from autopar.runtime.profiling import Row, _kind, _word, _words

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
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.down(torch.relu(self.up(x))).square().mean()


SCHEMES: dict[str, dict[str, Any]] = {
    "zero3": {"scheme": "zero3"},
    "stages": {"stages": 2, "micro_batches": 2, "schedule": "1f1b"},
}  # fmt: skip


@functools.cache
def plan_of(scheme: str) -> Plan:
    return autopar.plan(Net(), (torch.ones(8, 16),), devices=2, cluster="local-cpu", **SCHEMES[scheme])


def _profiled(scheme: str, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = autopar.parallelize(Net(), plan_of(scheme))
    optimizer = torch.optim.AdamW(module.parameters())
    module.train_step(torch.ones(8, 16), optimizer)
    with autopar.profile(module) as found:
        for _ in range(STEPS):
            module.train_step(torch.ones(8, 16), optimizer)
    found.save_trace(Path(folder) / f"{torch.distributed.get_rank()}.json")
    return found.json()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_in_parts(tmp_path: Path, scheme: str) -> None:
    plan_of(scheme)
    ranks = run_ranks(_profiled, 2, scheme, str(tmp_path))
    assert max(told["kinds"].get("products", 0.0) for told in ranks) > 0  # a stage may be without
    for rank, told in enumerate(ranks):
        assert len(told["steps"]) == STEPS and all(seconds > 0 for seconds in told["steps"])
        parts = {part["part"]: part["measured"] for part in told["parts"]}
        words = {_word(action) for action in told["actions"]}
        assert {Word.FORWARD, Word.BACKWARD} <= words and (Word.GATHER in words) == (scheme == "zero3")
        assert bool({Word.SEND_FORWARD, Word.RECEIVE_FORWARD} & words) == (scheme == "stages")
        inside = [seconds for name, seconds in parts.items() if name not in ("step", "collectives") and not name.startswith("memory")]
        assert sum(inside) >= 0.9 * parts["step"] and parts["forward"] > 0 and parts["update"] > 0
        assert len(told["deviations"]) == 3 and parts["memory beside parameters and optimizer"] > 0
        named = {event["name"] for event in json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))["traceEvents"]}
        assert {f"autopar:{action}" for action in told["actions"]} <= named


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


def test_words_and_kinds() -> None:
    assert [_word(text) for text in ("0F1.2", "3UNSHARD.0", "0REDUCE_GRAD1", "0RECV_B1>2", "1B0.0", "0W1")] == [
        Word.FORWARD, Word.GATHER, Word.REDUCE, Word.RECEIVE_BACKWARD, Word.BACKWARD, Word.BACKWARD_WEIGHT,
    ]  # fmt: skip
    assert [_kind(name) for name in ("aten::addmm", "gloo:all_reduce", "aten::add", "Optimizer.step#AdamW.step")] == [
        "products", "collectives", "elementwise and others", "update",
    ]  # fmt: skip
    assert _words(Row(part="update", measured=0.003, predicted=0.001)) == (
        "update takes 2 ms more than predicted: 3 ms, 3 times the predicted"
    )  # fmt: skip


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "profiled_model.py").write_text(MODEL, encoding="utf-8")
    run(["plan", "profiled_model:net", "--devices", "2", "--cluster", "local-cpu", "--scheme", "data", "-o", "plan.json", "--quiet"])
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
