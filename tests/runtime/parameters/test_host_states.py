"""`host_states`: the steps of the wrapped optimizer, with state that comes and goes in order, and
state dicts that can be carried over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from autopar.errors import RunError
from autopar.runtime.parameters.host_states import HostStates, Leaving, Link, Values, host_states
from autopar.sharding.state_chunks import chunks

STEPS = 4
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda given: AdamW(given, lr=0.01),
    "adamw foreach": lambda given: AdamW(given, lr=0.01, foreach=True),
    "amsgrad": lambda given: Adam(given, lr=0.01, amsgrad=True),
    "momentum": lambda given: SGD(given, lr=0.01, momentum=0.9),
    "nadam": lambda given: NAdam(given, lr=0.01),
    "rmsprop": lambda given: RMSprop(given, lr=0.01, momentum=0.5),
    "adagrad": lambda given: Adagrad(given, lr=0.01),
}


class Far(Link):
    """A host apart: what is stored there is poison to whoever uses it before it is fetched; a log
    of what happens.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.away: dict[int, Tensor] = {}
        self.on_device: list[int] = []
        self.most = 10**9

    def fetch(self, values: Values) -> Any:
        self.log.append(("fetch", len(values)))
        for value in values:
            value.data = self.away.pop(id(value))
        self.on_device.append(len(values))
        assert sum(self.on_device) <= self.most, "three chunks at once"
        return ("came", len(self.log))

    def arrive(self, event: Any) -> None:
        assert event[0] == "came"
        self.log.append(("arrive", 0))

    def store(self, values: Values) -> Leaving:
        self.log.append(("store", len(values)))
        for value in values:
            self.away[id(value)] = value.data
            value.data = torch.full_like(value, float("nan"))
        return _Gone(self, len(values))


class _Gone(Leaving):
    """Has left the device when it is waited for."""

    def __init__(self, link: Far, count: int) -> None:
        super().__init__()
        self.link = link
        self.count = count

    def wait(self) -> None:
        self.link.log.append(("left", self.count))
        if self.count in self.link.on_device:
            self.link.on_device.remove(self.count)


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    ).double()


def train(module: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups with rates of their own."""
    given = list(module.parameters())
    return [{"params": given[:3]}, {"params": given[3:], "lr": 0.003}]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("held", [[0], [1, 2, 4], [0, 1, 2, 3, 4, 5]])
def test_the_steps_are_those_of_the_optimizer_alone(name: str, held: list[int]) -> None:
    """Bit by bit, with a schedule of the rate, whatever has its state elsewhere; what is not
    fetched in time is seen.
    """
    alone = model()
    mine = model()
    plain, inner = (OPTIMIZERS[name](groups(m)) for m in (alone, mine))
    link = Far()
    wrapped = HostStates(inner, [list(mine.parameters())[i] for i in held], link)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in (plain, wrapped)]
    for step in range(STEPS):
        train(alone, plain, range(step, step + 1))
        train(mine, wrapped, range(step, step + 1))
        for schedule in schedules:
            schedule.step()
    for one, other in zip(alone.parameters(), mine.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (
        isinstance(wrapped, Optimizer)
        and wrapped.param_groups is inner.param_groups
        and wrapped.state is inner.state
    )
    assert [g["lr"] for g in wrapped.param_groups] == [g["lr"] for g in plain.param_groups]
    states = [value for parameter in wrapped.held for value in inner.state[parameter].values()]
    assert len(link.away) == sum(isinstance(value, Tensor) and value.dim() > 0 for value in states)


def test_the_next_comes_while_one_is_updated_and_three_are_there_at_once() -> None:
    mine = nn.ParameterList(nn.Parameter(torch.ones(4, 4)) for _ in range(6))
    link = Far()
    wrapped = HostStates(AdamW(mine.parameters()), list(mine.parameters()), link)
    link.most = 3 * 2
    for _ in range(2):
        link.log.clear()
        for parameter in mine:
            parameter.grad = torch.ones_like(parameter)
        wrapped.step()
    order = [what for what, _ in link.log if what != "left"]
    assert order == ["fetch", *["fetch", "arrive", "store"] * 5, "arrive", "store"]
    stored = [index for index, (what, _) in enumerate(link.log) if what == "store"]
    for number, index in enumerate(i for i, (what, _) in enumerate(link.log) if what == "fetch"):
        left = [what for what, count in link.log[:index] if what == "left" and count]
        assert len(left) >= number - 2, "a place is given back before it is used again"
    assert len(stored) == 6 and link.log[-1] == ("left", 2)


def test_small_parameters_go_together() -> None:
    sizes = [64, 2, 2, 2, 64, 2]
    mine = nn.ParameterList(nn.Parameter(torch.ones(size)) for size in sizes)
    link = Far()
    wrapped = HostStates(SGD(mine.parameters(), momentum=0.9), list(mine.parameters()), link)
    for _ in range(2):
        link.log.clear()
        for parameter in mine:
            parameter.grad = torch.ones_like(parameter)
        wrapped.step()
    assert (
        [count for what, count in link.log if what == "store"]
        == [len(sizes[chunk]) for chunk in chunks(sizes)]
        == [1, 3, 1, 1]
    )


def test_what_has_no_gradient_is_left_alone() -> None:
    mine = model()
    wrapped = HostStates(AdamW(mine.parameters()), list(mine.parameters()), Far())
    before = copy.deepcopy(mine.state_dict())
    first = next(mine.parameters())
    first.grad = torch.ones_like(first)
    wrapped.step()
    changed = [
        name for name, value in mine.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert changed == ["0.weight"] and list(wrapped.state) == [first]


def test_a_closure_is_called_once() -> None:
    mine = model()
    wrapped = HostStates(SGD(mine.parameters(), lr=0.1), list(mine.parameters())[:2])
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        loss = mine(torch.ones(2, 8, dtype=torch.float64)).sum()
        loss.backward()
        return float(loss.detach())

    assert isinstance(wrapped.step(closure), float) and calls == [True]


def test_an_error_in_a_step_leaves_the_groups_whole() -> None:
    mine = model()

    class Broken(SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("no")

    wrapped = HostStates(Broken(mine.parameters(), lr=0.1), list(mine.parameters())[:2])
    with pytest.raises(RuntimeError, match="no"):
        wrapped.step()
    assert len(wrapped.param_groups[0]["params"]) == len(list(mine.parameters()))


@pytest.mark.parametrize("far", [False, True])
def test_state_dicts_are_carried_over(far: bool) -> None:
    """From the optimizer alone to the wrapped one and back: the same steps as without a break, and
    the same keys.
    """
    alone = model()
    mine = model()
    plain = AdamW(groups(alone), lr=0.01)
    train(alone, plain, range(2))
    saved = copy.deepcopy((alone.state_dict(), plain.state_dict()))
    before = copy.deepcopy(saved[1]["state"])
    train(alone, plain, range(2, 5))
    mine.load_state_dict(saved[0])
    link = Far() if far else Link()
    wrapped = HostStates(AdamW(groups(mine), lr=0.5), list(mine.parameters())[1:4], link)
    wrapped.load_state_dict(saved[1])
    assert (
        wrapped.param_groups is wrapped.inner.param_groups and wrapped.state is wrapped.inner.state
    )
    train(mine, wrapped, range(2, 3))
    if not far:
        again = model(1)
        again.load_state_dict(mine.state_dict())
        back = AdamW(groups(again), lr=0.01)
        back.load_state_dict(copy.deepcopy(wrapped.state_dict()))
        train(again, back, range(3, 5))
        assert all(
            torch.equal(one, other)
            for one, other in zip(alone.parameters(), again.parameters(), strict=True)
        )
        assert wrapped.state_dict().keys() == back.state_dict().keys()
    train(mine, wrapped, range(3, 5))
    assert all(
        torch.equal(one, other)
        for one, other in zip(alone.parameters(), mine.parameters(), strict=True)
    )
    for i in range(1, 4):
        assert torch.equal(saved[1]["state"][i]["exp_avg"], before[i]["exp_avg"]), (
            "what was given is not changed"
        )


def test_only_a_planned_module_says_what_is_in_host_memory() -> None:
    mine = model()
    with pytest.raises(RunError, match=r"autopar\.parallelize"):
        host_states(AdamW(mine.parameters()), mine)
