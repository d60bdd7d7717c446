"""Plans on the strict backend: one device's numbers, and no rule of NCCL broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import plan_loaded
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.runtime.run import run_plan
from autopar.runtime.strict_backend import NAME
from tests.runtime.tied_blocks import tied_blocks, tokens


def _tied() -> LoadedModel:
    return load_model(tied_blocks(6), ModelOptions(train=True), (tokens(),))


def _chain() -> LoadedModel:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    inputs = (torch.randn(8, 16, dtype=torch.float64),)
    return load_model(nn.Sequential(*layers).double(), ModelOptions(train=True), inputs)


class _Marks(nn.Module):
    """Layers whose result has the signs of the first one, which travel as numbers of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 16]."""
        h = self.first(x)
        marks = h.sign().to(torch.int16)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h * marks


def _marks() -> LoadedModel:
    inputs = (torch.randn(8, 16, dtype=torch.float64),)
    return load_model(_Marks().double(), ModelOptions(train=True), inputs)


PLANS: list[tuple[Callable[[], LoadedModel], dict[str, Any]]] = [
    (_chain, {"devices": 2, "scheme": "data"}),
    # Two of the stages sum a tied parameter, the others make no group for it.
    (_tied, {"devices": 4, "stages": 4, "micro_batches": 4, "schedule": "gpipe"}),
    (_chain, {"devices": 2, "stages": 2, "micro_batches": 4, "schedule": "1f1b"}),
    (_chain, {"devices": 2, "stages": 2, "micro_batches": 4, "schedule": "zero_bubble"}),
    (
        _chain,
        {"devices": 2, "stages": 2, "micro_batches": 4, "schedule": "interleaved", "interleave": 2},
    ),
    (_marks, {"devices": 2, "stages": 2, "micro_batches": 2, "schedule": "1f1b"}),
]


@pytest.mark.parametrize(("model", "wanted"), PLANS)
def test_plans(model: Callable[[], LoadedModel], wanted: dict[str, Any]) -> None:
    """Two steps of a plan, compared with one device and with its prices."""
    loaded = model()
    plan = plan_loaded(loaded, cluster="local-cpu", **wanted).plan
    report = run_plan(loaded, plan, steps=2, check=True, backend=NAME)
    assert report.ok and "as priced" in report.collectives, report
    assert report.backend == NAME
