"""Plans by the number of devices: kept, carried over to another number, made anew where nothing
fits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.configured import load_any
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions
from autopar.model import LoadedModel
from autopar.training.replanning import PLANS, plan_for

OPTIONS = {"cluster": "dgx-h100", "scheme": None}


class Net(nn.Module):
    """Two products, large enough to be split, and divisible by 2, 3, 4, 6, 8."""

    def __init__(self, width: int = 9600) -> None:
        super().__init__()
        self.up = nn.Linear(1200, width)
        self.down = nn.Linear(width, 1200)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.down(torch.relu(self.up(x))).square().mean()


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_any(Net(), ModelOptions(train=True), (torch.zeros(9600, 1200),))


def test_a_plan_is_searched_once_for_each_number(model: LoadedModel, tmp_path: Path) -> None:
    first = plan_for(model, 8, tmp_path, OPTIONS)
    assert (first.origin, plan_for(model, 8, tmp_path, OPTIONS).origin) == (
        "planned anew",
        "planned before",
    )
    assert plan_for(model, 8, tmp_path, OPTIONS).plan == first.plan
    assert (
        plan_for(model, 8, tmp_path, {**OPTIONS, "memory": 1e9}).origin == "planned anew"
    )  # another question
    other = load_any(Net(4800), ModelOptions(train=True), (torch.zeros(9600, 1200),))
    assert plan_for(other, 8, tmp_path, OPTIONS).origin == "planned anew"
    assert plan_for(model, 1, tmp_path, OPTIONS).origin == "planned anew"


def test_a_damaged_plan_is_made_again(model: LoadedModel, tmp_path: Path) -> None:
    first = plan_for(model, 4, tmp_path, OPTIONS)
    (path,) = (tmp_path / PLANS).iterdir()
    path.write_text(path.read_text(encoding="utf-8")[:-200], encoding="utf-8")
    planned_model = plan_for(model, 4, tmp_path, OPTIONS)
    assert (planned_model.origin, planned_model.plan) == ("planned anew", first.plan)


@pytest.mark.parametrize("scheme", ["data", "megatron"])
@pytest.mark.parametrize("devices", [2, 4, 6])
def test_strategies_are_carried_over(
    model: LoadedModel, tmp_path: Path, scheme: str, devices: int
) -> None:
    """To any mesh: an operator is split by what it was split by."""
    before = plan_for(model, 8, tmp_path, {**OPTIONS, "scheme": scheme}).plan
    (path,) = (tmp_path / PLANS).iterdir()
    path.rename(path.with_name(f"8-devices-{_free_key(model, tmp_path)}.json"))
    planned_model = plan_for(model, devices, tmp_path, OPTIONS)
    assert (planned_model.origin, planned_model.plan.devices) == (
        "planned with the strategies for 8 devices",
        devices,
    )
    for name, operator in planned_model.plan.operators.items():
        assert {*operator.strategy} <= {*before.operators[name].strategy}, name


def _free_key(model: LoadedModel, folder: Path) -> str:
    """How a plan without a scheme is named."""
    plan_for(model, 1, folder / "other", OPTIONS)
    (path,) = (folder / "other" / PLANS).iterdir()
    return path.stem.rpartition("-")[2]


def test_ranks_are_left_idle_where_a_scheme_does_not_divide(
    model: LoadedModel, tmp_path: Path
) -> None:
    assert plan_for(model, 7, tmp_path, {**OPTIONS, "scheme": "data"}).plan.devices == 6
    assert plan_for(model, 11, tmp_path, {**OPTIONS, "scheme": "data"}).plan.devices == 10
    with pytest.raises(UsageError, match="unknown scheme 'dat'"):
        plan_for(model, 7, tmp_path, {**OPTIONS, "scheme": "dat"})
