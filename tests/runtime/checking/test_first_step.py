"""The first step of a plan is checked against one undivided pass, on ranks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import AutoparError, RunError
from autopar.runtime.checking import first_step
from autopar.runtime.launch import run_ranks
from autopar.sharding.time_walk import TimeWalk
from tests.habits.workshop import PLANS, Gpt

PLANNED: Mapping[str, Any] = {"devices": 2, "cluster": "local-cpu", "proof": False}


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels."""
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(16, (batch, length + 1), generator=draw)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def told(
    module: nn.Module, plan: autopar.Plan, given: Any, room: int | None = None, times: int = 4
) -> str:
    """The outcome of the check on a rank."""
    first_step.TIMES = times
    if room is not None:
        first_step.free_memory = lambda device: room
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            autopar.parallelize(module, plan, given, check=True)
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return said.getvalue()


@pytest.mark.parametrize("name", ["data, micro-batches", "megatron", "1f1b"])
def test_a_step_is_that_of_one_device(name: str) -> None:
    module = Gpt().double()
    given = tokens(32, 64)
    plan = autopar.plan(module, given, **PLANNED, **PLANS[name])
    first, second = run_ranks(told, 2, module, plan, given, timeout=60)
    assert "its loss and 44 gradients are those of one undivided pass" in first
    assert "samples of 8" in first or "samples of 16" in first
    assert second == ""


class Pairs(nn.Module):
    """Reads its ids by places in dim 1, and adds a constant to its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 16)
        self.head = nn.Linear(16, 48)

    def forward(self, ids: Tensor) -> Tensor:
        """The flooded loss of the second ids."""
        scores = self.head(torch.tanh(self.table(ids[:, 0])))
        return (functional.cross_entropy(scores, ids[:, 1]) - 0.1).abs() + 0.1


def test_gradients_times_the_micro_batches_are_refused_by_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TimeWalk, "_prove_sum", lambda _: None)
    monkeypatch.setattr(TimeWalk, "_must_be_cut", lambda _, operator: False)
    module = Pairs().double()
    given = (torch.randint(48, (8, 2)),)
    options = {"scheme": "data", "stages": 1, "micro_batches": 2}
    plan = autopar.plan(module, given, **PLANNED, **options)
    for said in run_ranks(told, 2, module, plan, given, timeout=60):
        assert said.startswith("RunError: the plan's step differs from one undivided pass"), said


def test_a_model_that_does_not_fit_twice_is_checked_with_fewer_layers() -> None:
    module = Gpt(layers=6).double()
    given = tokens(32, 64)
    plan = autopar.plan(module, given, **PLANNED, scheme="data")
    first, _ = run_ranks(told, 2, module, plan, given, 2**30, 2**30, timeout=60)
    assert "5 equal layers left out" in first


def test_what_is_too_large_is_said() -> None:
    module = Gpt().double()
    given = tokens(32, 64)
    plan = autopar.plan(module, given, **PLANNED, scheme="data")
    first, second = run_ranks(told, 2, module, plan, given, 1000, timeout=60)
    assert "the first step is not checked: it takes" in first and second == ""


def test_a_check_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> str:
        raise RunError("not asked for")

    module = Gpt().double()
    given = tokens(8, 4)
    plan = autopar.plan(module, given, devices=1, cluster="local-cpu", proof=False)
    monkeypatch.setattr("autopar.runtime.parallelize.check_first_step", never)
    autopar.parallelize(module, plan, given, check=False)
    with pytest.raises(RunError, match="not asked for"):
        autopar.parallelize(module, plan, given, check=True)


def test_dropout_is_off_in_both_passes() -> None:
    module = Gpt(drop=0.3).double()
    given = tokens(8, 4)
    plan = autopar.plan(module, given, **PLANNED, scheme="data")
    first, _ = run_ranks(told, 2, module, plan, given, timeout=60)
    assert "are those of one undivided pass" in first
