"""Calls that do not fit are refused on every rank, with the reason, and no rank is left waiting."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import plan
from autopar.errors import AutoparError, PlanError, RunError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks


def _model(hidden: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, hidden), nn.Tanh(), nn.Linear(hidden, 16))


def _plan(devices: int) -> Plan:
    return plan(
        _model(), (torch.zeros(8, 16),), devices=devices, cluster="local-cpu", scheme="data"
    )


def _called(made: Plan, *given: object) -> Tensor:
    called: Tensor = autopar.parallelize(_model(), made)(*given)
    return called


ATTEMPTS: dict[str, tuple[Callable[[Plan, Plan], object], type[AutoparError], str]] = {
    "world size": (
        lambda two, four: autopar.parallelize(_model(), four),
        PlanError,
        "the plan is for 4 ranks, but 2 run",
    ),
    "another model": (
        lambda two, four: autopar.parallelize(_model(hidden=64), two),
        PlanError,
        "does not match the model",
    ),
    "an activation": (
        lambda two, four: autopar.parallelize(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), two
        ),
        PlanError,
        "does not match the model",
    ),
    "no weights": (
        lambda two, four: autopar.parallelize(_model().to("meta"), two),
        AutoparError,
        "materialise it before running",
    ),
    "another length": (
        lambda two, four: _called(two, torch.zeros(8, 9)),
        PlanError,
        r"'input' is \[8, 9\], planned as \[8, 16\]",
    ),
    "another dtype": (
        lambda two, four: _called(two, torch.zeros(8, 16).double()),
        PlanError,
        r"is torch.float64 \[8, 16\]",
    ),
    "too many inputs": (
        lambda two, four: _called(two, torch.zeros(8, 16), torch.zeros(8, 16)),
        PlanError,
        "cannot be called so",
    ),
    "no tensor": (
        lambda two, four: _called(two, None),
        PlanError,
        "was planned as a tensor float32",
    ),
    "a form of outputs": (
        lambda two, four: autopar.parallelize(_model(), two, outputs="local"),
        AutoparError,
        "valid are split, whole",
    ),
}


def _attempt(name: str, two: Plan, four: Plan) -> str:
    make, kind, reason = ATTEMPTS[name]
    with pytest.raises(kind, match=reason) as caught:
        make(two, four)
    return str(caught.value)


def _all_attempts(two: Plan, four: Plan) -> list[str]:
    """Every attempt, and after them a call that is right."""
    attempts = [_attempt(name, two, four) for name in ATTEMPTS]
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(_called(two, x), _model()(x))
    return attempts


def test_all_ranks_refuse_alike() -> None:
    """No collective is left half done: the ranks go on together afterwards."""
    two = _plan(2)
    four = _plan(4)
    messages = run_ranks(_all_attempts, 2, two, four, timeout=60)
    assert len(messages[0]) == len(ATTEMPTS) and messages[0] == messages[1]


def _nccl(made: Plan) -> str:
    with pytest.raises(RunError) as caught:
        autopar.parallelize(_model(), made, backend="nccl")
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_cuda() -> None:
    """Among ranks, for a single one, and for a run."""
    from autopar.frontends.load import ModelOptions, load_model
    from autopar.runtime.run import run_plan

    assert all("needs CUDA" in message for message in run_ranks(_nccl, 2, _plan(2), timeout=60))
    assert "needs CUDA" in _nccl(_plan(1))
    with pytest.raises(RunError, match="needs CUDA"):
        run_plan(
            load_model(_model(), ModelOptions(), (torch.zeros(8, 16),)), _plan(2), backend="nccl"
        )


def test_one_rank_with_another_input_ends_all() -> None:
    """The others learn of it at once, not when a collective times out."""

    def call() -> None:
        shape = (8 if torch.distributed.get_rank() else 4, 16)
        _called(two, torch.zeros(math.prod(shape)).view(shape)).sum().backward()  # type: ignore[no-untyped-call]

    two = _plan(2)
    with pytest.raises(RunError, match=r"the batch of rank 1 is another than that of rank 0"):
        run_ranks(call, 2, timeout=60)
