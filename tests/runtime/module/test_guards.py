"""Changes of a planned module: followed, or refused where they are made or at the next call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.facts import is_plain
from autopar.frontends.torch.importer import import_torch
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.changes import skeleton_of
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

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.statistics = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.head = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.spare = nn.Identity()
        self.steps = 0
        self.options = SimpleNamespace(scale=1.0, label="read by nobody")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.head(self.frozen(self.statistics(x)))
        return (x * self.options.scale).square().mean()


def build(norm: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(norm).double()


def quiet(norm: bool = False) -> Model:
    """The model with dropout that drops nothing: its random numbers are not one device's."""
    module = build(norm)
    for layer in module.layers:
        layer.drop.p = 1e-12
    return module


def plan_of(name: str) -> Plan:
    return autopar.plan(build(), X, devices=2, cluster="local-cpu", **PLANS[name])


SOME = [
    name if name in ("zero3", "1f1b") else pytest.param(name, marks=pytest.mark.slow)
    for name in PLANS
]
"""All plans, of which some are tried in every run of the tests."""

Change = Callable[[Any], None]


def _sets(path: str, value: object) -> Change:
    *parents, leaf = path.split(".")
    return lambda module: setattr(module.get_submodule(".".join(parents)), leaf, value)


def _changes_an_item(module: Any) -> None:
    module.layers[1].gates[0] = 0.5


def _changes_an_equal_list(module: Any) -> None:
    module.layers[1].gates = [1.0, 2.0]
    _changes_an_item(module)


OTHER_PROGRAMS: dict[str, Change] = {
    "a number": _sets("layers.1.tau", 3.0),
    "one of the class": _sets("layers.1.slope", 0.1),
    "one that is not public": _sets("layers.1._hidden", 1.0),
    "a list": _sets("layers.1.gates", [0.1, 2.0]),
    "an item of a list": _changes_an_item,
    "an item of a list that was set to an equal one": _changes_an_equal_list,
    "one of torch's modules": _sets("layers.0.norm.eps", 1e-1),
    "a dropout in evaluation": lambda module: module.layers[3].drop.eval(),
    "a field of an object": lambda module: setattr(module.options, "scale", 0.5),
    "several": lambda module: (setattr(module.layers[0], "tau", 1.5), _changes_an_item(module)),
}
"""Changes that get a program of their own."""
NORMS: dict[str, Change] = {
    "in evaluation": lambda module: module.statistics.eval(),
    "in training, the whole in evaluation": lambda module: (
        module.eval(),
        module.statistics.train(),
    ),
    "its momentum": _sets("statistics.momentum", 0.5),
}
"""Those of a norm over batches, which no plan with micro-batches has."""
REFUSED: dict[str, Change] = {
    "layers.1.doubled": _sets("layers.1.doubled", 1.0),
    "layers.1.tau": _sets("layers.1.tau", torch.tensor(3.0)),
    "layers.0.forward": _sets("layers.0.forward", lambda x: x),
    "layers.2.linear": _sets("layers.2.linear", nn.Linear(16, 16)),
    "head": _sets("head", nn.Identity()),
}
"""Refused at the next call; the name is that of the attribute."""


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
    for name, change in REFUSED.items():
        module = autopar.parallelize(build(), plan)
        change(module)
        with pytest.raises(PlanError, match="and parallelize again") as error:
            module.loss(X)
        assert repr(name) in str(error.value)
        told[name] = "refused"
    return told


Seen = tuple[float, dict[str, Tensor]]
"""A loss, and gradients and statistics by name."""


def _seen_alone(change: Change, norm: bool = False) -> Seen:
    module = quiet(norm)
    change(module)
    loss = module(X)
    loss.backward()
    seen = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return float(loss), seen | dict(module.named_buffers())


def _seen(module: ParallelModule) -> Seen:
    module.zero_grad()
    loss = module(X)
    loss.backward()
    gradients = {n: p.grad for n, p in module.graph_parameters().items() if p.grad is not None}
    return float(loss), module.full_values(gradients) | dict(module.named_buffers())


def _require_equal(seen: Seen, alone: Seen) -> None:
    assert seen[0] == pytest.approx(alone[0], rel=1e-9)
    torch.testing.assert_close(seen[1], alone[1], rtol=1e-9, atol=1e-12)


def _other_programs(plan: Plan) -> None:
    as_planned = _seen_alone(lambda module: None)
    for change in OTHER_PROGRAMS.values():
        module = autopar.parallelize(quiet(), plan)
        twin = copy.deepcopy(module)
        change(module)
        _require_equal(_seen(module), _seen_alone(change))
        # Lists and objects are shared with a module's copies, other changes are its own.
        module.layers[1].gates[0] = 1.0
        module.options.scale = 1.0
        _require_equal(_seen(twin), as_planned)
    module = autopar.parallelize(quiet(), plan)
    for tau in (3.0, 2.0, 3.0):
        module.layers[1].tau = tau
        _require_equal(_seen(module), _seen_alone(_sets("layers.1.tau", tau)))
    with pytest.raises(PlanError, match=r"'layers\.1\.tau'(.|\n)*programs for other changes"):
        for number in range(20):
            module.layers[1].tau = 4.0 + number
            module.loss(X)


def _changed_norms(plan: Plan) -> None:
    for change in NORMS.values():
        module = autopar.parallelize(quiet(norm=True), plan)
        change(module)
        _require_equal(_seen(module), _seen_alone(change, norm=True))


def quiet_plan_of(name: str, norm: bool = False) -> Plan:
    return autopar.plan(quiet(norm), X, devices=2, cluster="local-cpu", **PLANS[name])


@pytest.mark.parametrize("name", ["data", "zero3"])
def test_a_norm_over_batches_trains_as_on_one_device(name: str) -> None:
    run_ranks(_changed_norms, 2, quiet_plan_of(name, norm=True), timeout=300)


@pytest.mark.parametrize("name", SOME)
def test_a_changed_module_trains_as_on_one_device(name: str) -> None:
    run_ranks(_other_programs, 2, quiet_plan_of(name), timeout=300)


def _unfreeze(module: Any) -> None:
    module.frozen.requires_grad_(True)


def _unfrozen(plan: Plan) -> None:
    module = autopar.parallelize(quiet(), plan)
    _unfreeze(module)
    _require_equal(_seen(module), _seen_alone(_unfreeze))
    total = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    alone = quiet()
    _unfreeze(alone)
    alone(X).backward()
    wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e-3)
    assert float(total) == pytest.approx(float(wanted), rel=1e-9)
    module.frozen.requires_grad_(False)
    _seen(module)
    assert module.frozen.weight.grad is None


@pytest.mark.parametrize("name", SOME)
def test_an_unfrozen_parameter_trains(name: str) -> None:
    run_ranks(_unfrozen, 2, quiet_plan_of(name), timeout=300)


class Repeated(nn.Module):
    """A model in which an attribute says how many operators there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.times = 2
        self.factor = 1.0
        self.lock: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.linear(x).tanh()
        return (x * self.factor).square().mean()


def _no_program(plan: Plan) -> list[str]:
    told = []
    module = autopar.parallelize(Repeated(), plan)
    module.times = 3
    with pytest.raises(PlanError) as error:
        module.loss(X.float())
    told.append(str(error.value))
    module.times = 2
    module.loss(X.float())
    module.factor = 2.0 + torch.distributed.get_rank()
    with pytest.raises(PlanError) as error:
        module.loss(X.float())
    told.append(str(error.value))
    held = Repeated()
    # Only leaves of autograd can be copied.
    held.lock = torch.ones(1, requires_grad=True) * 2
    module = autopar.parallelize(held, plan)
    module.factor = 2.0
    with pytest.raises(PlanError) as error:
        module.loss(X.float())
    return [*told, str(error.value)]


def test_what_no_program_follows_is_refused_by_name_on_every_rank() -> None:
    plan = autopar.plan(Repeated(), X.float(), devices=2, cluster="local-cpu", scheme="data")
    for more, apart, locked in run_ranks(_no_program, 2, plan):
        assert "'times' was read as 2" in more and "no strategy for the operator" in more
        assert "the changes of the module" in apart
        assert "'factor' was read as 1.0" in locked and "exported once more" in locked


def test_a_skeleton_holds_no_weights_and_shares_plain_attributes() -> None:
    module = build()
    skeleton = skeleton_of(module, is_plain)
    assert skeleton is not None
    assert {value.device.type for value in skeleton.state_dict().values()} == {"meta"}
    assert skeleton.layers[1].gates is module.layers[1].gates
    assert skeleton.layers[1] is not module.layers[1]
    assert not skeleton.frozen.weight.requires_grad and skeleton.head.weight.requires_grad


@pytest.mark.parametrize("name", SOME)
def test_a_change_is_followed_or_refused_by_name(name: str) -> None:
    for told in run_ranks(_habits, 2, plan_of(name), timeout=300):
        assert set(told.values()) == {"followed", "refused"}
        assert set(told) == {*FOLLOWED, *REFUSED}


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
