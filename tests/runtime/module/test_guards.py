"""Changes of a planned module: followed, or refused where they are made or at the next call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.frontends.torch.importer import import_torch
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PLANS: dict[str, dict[str, Any]] = {
    "data": {"scheme": "data"},
    "data-micro": {"scheme": "data", "micro_batches": 2},
    "zero3": {"scheme": "zero3"},
    "search": {},
    "1f1b": {"stages": 2, "micro_batches": 2, "schedule": "1f1b"},
    "interleaved": {"stages": 2, "micro_batches": 2, "interleave": 2},
    "zero_bubble": {"stages": 2, "micro_batches": 2, "schedule": "zero_bubble"},
}


class Layer(nn.Module):
    """A layer that reads attributes of its own, of its class, and a list of them."""

    slope = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)
        self.tau = 2.0
        self.gates = [1.0, 2.0]
        self._hidden = 3.0
        self.remark = "read by nobody"

    @property
    def doubled(self) -> float:
        """A number made of another."""
        return 2 * self.tau

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.linear(self.norm(x)) / self.tau, self.slope)
        return x + self.drop(y) * self.gates[0] * self._hidden / self.doubled


class Model(nn.Module):
    """Layers, and modules that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.spare = nn.Identity()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.frozen(x)).square().mean()


def build() -> Model:
    torch.manual_seed(0)
    return Model().double()


def plan_of(name: str) -> Plan:
    return autopar.plan(build(), X, devices=2, cluster="local-cpu", **PLANS[name])


Change = Callable[[Any], None]


def _sets(path: str, value: object) -> Change:
    *parents, leaf = path.split(".")
    return lambda module: setattr(module.get_submodule(".".join(parents)), leaf, value)


def _deletes(path: str) -> Change:
    *parents, leaf = path.split(".")
    return lambda module: delattr(module.get_submodule(".".join(parents)), leaf)


AT_ONCE: dict[str, Change] = {
    "layers.1.tau": _sets("layers.1.tau", 3.0),
    "layers.1.slope": _sets("layers.1.slope", 0.1),
    "layers.1._hidden": _sets("layers.1._hidden", 1.0),
    "layers.1.gates": _sets("layers.1.gates", [0.0, 2.0]),
    "layers.1.doubled": _sets("layers.1.doubled", 1.0),
    "layers.0.drop.p": _sets("layers.0.drop.p", 0.0),
    "layers.0.norm.eps": _sets("layers.0.norm.eps", 1e-3),
    "layers.0.forward": _sets("layers.0.forward", lambda x: x),
    "layers.2.linear": _sets("layers.2.linear", nn.Linear(16, 16)),
    "head": _sets("head", nn.Identity()),
}
"""Refused at the line where it is made; the name is that of the attribute."""


def _changes_an_item(module: Any) -> None:
    module.layers[1].gates[0] = 0.0


def _frozen(module: Any) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(True)


def _restores(module: Any) -> None:
    for layer in module.layers:
        layer.gates[0] = 1.0


AT_THE_CALL: dict[str, tuple[str, Change, Change]] = {
    "a list": ("layers.1.gates", _changes_an_item, _restores),
    "dropout off": ("layers.3.drop", lambda m: m.layers[3].drop.eval(), lambda m: m.train()),
    "dropout in evaluation": (
        "layers.2.drop",
        lambda m: (m.eval(), m.layers[2].drop.train()),
        lambda m: m.train(),
    ),
    "a list that was set to an equal one": (
        "layers.1.gates",
        lambda m: (setattr(m.layers[1], "gates", [1.0, 2.0]), _changes_an_item(m)),
        _restores,
    ),
    "unfrozen": ("frozen.", _frozen, lambda m: m.frozen.requires_grad_(False)),
}
"""Refused at the next call: the name in the error, the change, and its opposite."""
FOLLOWED: dict[str, Change] = {
    "the same number": _sets("layers.1.tau", 2.0),
    "an equal list": _sets("layers.1.gates", [1.0, 2.0]),
    "a remark": _sets("layers.1.remark", "another"),
    "a new attribute": _sets("layers.1.note", 1),
    "a counter": _sets("steps", 5),
    "an unused module": _sets("spare", nn.Tanh()),
    "the same module": lambda module: setattr(module, "head", module.head),
    "a wrapped forward pass": lambda module: setattr(
        module, "forward", (lambda forward: lambda *a: forward(*a))(module.forward)
    ),
    "evaluation and back": lambda module: (module.eval(), module(X), module.train()),
    "a frozen layer": lambda module: module.layers[1].requires_grad_(False),
}


def _habits(plan: Plan) -> dict[str, str]:
    told: dict[str, str] = {}
    for name, change in FOLLOWED.items():
        module = autopar.parallelize(build(), plan)
        change(module)
        module.loss(X).backward()
        told[name] = "followed"
    module = autopar.parallelize(build(), plan)
    for name, change in AT_ONCE.items():
        with pytest.raises(PlanError, match="and parallelize again") as error:
            change(module)
        assert repr(name) in str(error.value)
        told[name] = "refused"
    with pytest.raises(PlanError, match=r"'layers\.0\.tau'"):
        _deletes("layers.0.tau")(module)
    for part, change, opposite in AT_THE_CALL.values():
        change(module)
        with pytest.raises(PlanError, match=f"{part}|another stage refuse"):
            module.loss(X).backward()
        opposite(module)
        module.loss(X).backward()
    _require_copies(module)
    return told


def _require_copies(module: ParallelModule) -> None:
    twin = copy.deepcopy(module)
    twin.layers[0].drop.eval()
    with pytest.raises(PlanError, match=r"layers\.0\.drop"):
        twin.loss(X)
    module.loss(X)
    with pytest.raises(PlanError, match="tau"):
        twin.layers[0].tau = 5.0


@pytest.mark.parametrize("name", PLANS)
def test_a_change_is_followed_or_refused_by_name(name: str) -> None:
    for told in run_ranks(_habits, 2, plan_of(name), timeout=300):
        assert set(told.values()) == {"followed", "refused"}
        assert set(told) == {*FOLLOWED, *AT_ONCE}


class Frozen(nn.Module):
    """A norm over the batch that is kept in evaluation, as fine-tuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(x))).square().mean()


def _frozen_norm() -> Frozen:
    torch.manual_seed(0)
    module = Frozen().double()
    module.norm.eval()
    return module


def _modes(plan: Plan) -> tuple[float, float]:
    module = autopar.parallelize(_frozen_norm(), plan)
    assert module.training and module.drop.training and not module.norm.training
    module.loss(X).backward()
    module.train()
    with pytest.raises(PlanError, match=r"'norm' is in training(.|\n)*call eval\(\) on it"):
        module.loss(X)
    module.norm.eval()
    module.drop.eval()
    with pytest.raises(PlanError, match=r"'drop' is in evaluation(.|\n)*call train\(\) on it"):
        module.loss(X)
    module.eval()
    with torch.no_grad():
        return float(module.loss(X)), float(_frozen_norm().eval()(X))


def test_submodules_begin_in_the_modes_in_which_they_were_planned() -> None:
    plan = autopar.plan(_frozen_norm(), X, devices=2, cluster="local-cpu", scheme="data")
    for ours, alone in run_ranks(_modes, 2, plan):
        assert ours == pytest.approx(alone, rel=1e-12)


class Complex(nn.Module):
    """A parameter of a type that no plan trains."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(16, dtype=torch.complex64))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.phase.abs()).square().mean()


def test_a_complex_parameter_is_not_frozen_in_silence() -> None:
    x = X.float()
    plan = autopar.plan(Complex(), x, devices=2, cluster="local-cpu", scheme="data")

    def refused() -> str:
        with pytest.raises(PlanError) as error:
            autopar.parallelize(Complex(), plan)
        return str(error.value)

    for told in run_ranks(refused, 2):
        assert "'phase' requires a gradient, but the plan trains no torch.complex64" in told


def test_the_reads_of_a_module_are_those_of_its_own_code() -> None:
    reads = import_torch(build(), (X,)).reads
    assert "spare" not in reads and "frozen" in reads and "steps" not in reads[""]
    assert {"tau", "slope", "gates", "doubled", "_hidden", "forward"} <= reads["layers.0"]
    assert "remark" not in reads["layers.0"] and {"p", "training"} <= reads["layers.0.drop"]
    assert "__getattribute__" not in vars(nn.Module)
