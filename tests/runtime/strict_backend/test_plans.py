"""Plans on the strict backend: one device's numbers, and no rule of NCCL broken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import plan_loaded
from autopar.errors import RunError
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.runtime.launch.rank_process import BACKEND
from autopar.runtime.run import RunReport, run_plan
from autopar.runtime.strict_backend import NAME


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks forked in these tests are strict ones."""
    monkeypatch.setenv(BACKEND, NAME)


class _Tied(nn.Module):
    """Six blocks between an embedding and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
            for _ in range(6)
        )
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _tied() -> LoadedModel:
    tokens = torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(1))
    return load_model(_Tied().double(), ModelOptions(train=True), (tokens,))


def _chain() -> LoadedModel:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    inputs = (torch.randn(8, 16, dtype=torch.float64),)
    return load_model(nn.Sequential(*layers).double(), ModelOptions(train=True), inputs)


def _run(model: LoadedModel, **wanted: Any) -> RunReport:
    """Two steps of a plan, compared with one device and with its prices."""
    plan = plan_loaded(model, cluster="local-cpu", **wanted).plan
    return run_plan(model, plan, steps=2, check=True)


def test_groups_made_by_their_members_alone_are_told() -> None:
    """Two of four stages sum a tied parameter; the world is bound, so a group is a split of it."""
    with pytest.raises(RunError, match=r"split on rank 0, but .* on rank 1"):
        _run(_tied(), devices=4, stages=4, micro_batches=4, schedule="gpipe")


@pytest.mark.parametrize(
    ("schedule", "interleave"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]
)
def test_messages_in_both_directions_of_one_queue_are_told(schedule: str, interleave: int) -> None:
    with pytest.raises(RunError, match=r"both send first|no rank can go on"):
        _run(
            _chain(), devices=2, stages=2, micro_batches=4, schedule=schedule, interleave=interleave
        )


def test_collectives_of_a_backward_pass_on_another_thread_are_known() -> None:
    report = _run(_chain(), devices=2, scheme="data")
    assert report.ok and "as priced" in report.collectives, report
