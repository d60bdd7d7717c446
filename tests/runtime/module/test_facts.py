"""Python state that a program rests on: followed, or refused by name, on every rank."""

from __future__ import annotations

import copy
import gc
import os
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, PlanError
from autopar.facts import Fact
from autopar.frontends.torch import import_torch
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.guards import Guards
from autopar.runtime.module.modes import Modes

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PLANS: dict[str, dict[str, Any]] = {
    "data": {"scheme": "data"},
    "tp": {"scheme": "megatron"},
    "search": {},
}
STEP: dict[str, Any] = {"n": 1, "unread": 0}
TAU = 1.0
SCALES = [1.0, 2.0]
OPTIONS = types.SimpleNamespace(scale=1.0, unread=0)
VARIABLE = "AUTOPAR_TEST_SCALE"
SOME = torch.ones(16, dtype=torch.float64)


def _closure() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    by = 1.0

    def scaled(x: Tensor) -> Tensor:
        return x * by

    def change(value: float) -> None:
        nonlocal by
        by = value

    return scaled, change


SCALED, CHANGE = _closure()


class Base(nn.Module):
    """Two layers, and a number of the class."""

    tau = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 32).double()
        self.down = nn.Linear(32, 16).double()
        self.calls = 0
        self.log: list[Any] = []
        self.mean = 0.0
        self.options = types.SimpleNamespace(count=0)

    def plain(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.down(self.up(x).tanh()).square().mean()


class OfGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) / STEP["n"]


class OfName(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) * TAU


class OfList(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) * sum(SCALES)


class OfObject(Base):
    def forward(self, x: Tensor) -> Tensor:
        options = OPTIONS
        return self.plain(x) * options.scale


class OfClass(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) * type(self).tau


class OfClosure(Base):
    def forward(self, x: Tensor) -> Tensor:
        return SCALED(self.plain(x))


class OfEnvironment(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) * float(os.getenv(VARIABLE, "1"))


class OfTensor(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x * SOME)


def _rebinds() -> None:
    globals()["TAU"] = 3.0


READ: dict[type[Base], Callable[[], object]] = {
    OfGlobal: lambda: STEP.update(n=2, unread=1),
    OfName: _rebinds,
    OfList: lambda: SCALES.append(3.0),
    OfObject: lambda: setattr(OPTIONS, "scale", 2.0),
    OfClass: lambda: setattr(OfClass, "tau", 2.0),
    OfClosure: lambda: CHANGE(2.0),
    OfEnvironment: lambda: os.environ.update({VARIABLE: "2"}),
}
"""State outside a module, and a change of it."""


def _followed(name: str) -> None:
    gc.freeze()
    for kind, change in READ.items():
        module = kind()
        alone = kind()
        plan = autopar.plan(kind(), X, devices=2, cluster="local-cpu", **PLANS[name])
        planned = autopar.parallelize(module, plan)
        assert float(planned(X)) == pytest.approx(float(alone(X)), rel=1e-12)
        before = float(alone(X))
        change()
        planned(X).backward()
        alone(X).backward()
        assert float(alone(X)) != before
        assert float(planned(X)) == pytest.approx(float(alone(X)), rel=1e-12), kind.__name__
        gradients = {n: p.grad for n, p in planned.graph_parameters().items()}
        wanted = {n: p.grad for n, p in alone.named_parameters()}
        torch.testing.assert_close(planned.full_values(gradients), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["data", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tp", "search"))]
)
def test_state_that_a_script_changes_is_followed(name: str) -> None:
    run_ranks(_followed, 2, name, timeout=300)


def _refused() -> list[str]:
    plan = autopar.plan(OfTensor(), X, devices=2, cluster="local-cpu", scheme="data")
    planned = autopar.parallelize(OfTensor(), plan)
    planned(X)
    SOME.mul_(2)
    told = []
    with pytest.raises(PlanError) as error:
        planned(X)
    told.append(str(error.value))
    plan = autopar.plan(OfGlobal(), X, devices=2, cluster="local-cpu", scheme="data")
    planned = autopar.parallelize(OfGlobal(), plan)
    with pytest.raises(PlanError) as error:
        for number in range(2, 20):
            STEP["n"] = number
            planned(X)
    return [*told, str(error.value)]


def test_what_no_program_follows_is_refused_with_its_place_on_every_rank() -> None:
    for tensor, often in run_ranks(_refused, 2, timeout=300):
        assert "'SOME' was read" in tensor and "test_facts.py:" in tensor
        assert "\"STEP['n']\" was read as 1" in often and "test_facts.py:" in often
        assert "programs for other changes" in often


def _unwatched() -> tuple[float, float]:
    Modes.facts = property(lambda self: [], lambda self, value: None)  # type: ignore[assignment]
    plan = autopar.plan(OfGlobal(), X, devices=2, cluster="local-cpu", scheme="data")
    planned = autopar.parallelize(OfGlobal(), plan)
    alone = OfGlobal()
    STEP["n"] = 2
    return float(planned(X)), float(alone(X))


def test_without_facts_a_program_keeps_the_first_value() -> None:
    for kept, wanted in run_ranks(_unwatched, 2):
        assert kept == pytest.approx(2 * wanted)


def test_a_small_model_looks_at_few_values() -> None:
    plan = autopar.plan(OfGlobal(), X, devices=1, cluster="local-cpu")
    planned = autopar.parallelize(OfGlobal(), plan)
    guards: Guards = planned._guards
    facts: list[Fact] = guards.modes.facts
    assert {fact.words for fact in facts} == {"STEP['n']", "Base.plain", "OfGlobal.plain"}
    assert len(guards.entries) < 20


def test_an_export_leaves_no_count_behind() -> None:
    module = copy.deepcopy(OfGlobal())
    before = {name: copy.copy(value) for name, value in vars(module).items()}
    import_torch(module, (X,))
    assert {name: vars(module)[name] for name in ("calls", "log", "mean")} == {
        name: before[name] for name in ("calls", "log", "mean")
    }
    assert issubclass(PlanError, AutoparError)
