"""Calls and backward passes in any sequence that torch allows: what one device gives for the same
lines.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.load import ModelOptions, load_model
from autopar.order.execution import Execution
from autopar.runtime.execution import autograd_node
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.sharding.analysis import analyse
from autopar.sharding.schedule import Schedule
from tests.runtime.nets import MODES, Net, net, on_this_rank, pipelined, planned

Losses = Callable[[Tensor], Tensor]
Silent = Callable[[], AbstractContextManager[object]]


class _Caller:
    """The network on one device or planned, for the same lines of a script."""

    def __init__(self, module: Net, ours: ParallelModule | None) -> None:
        self.ours = ours
        self.module: nn.Module = module if ours is None else ours
        names = ours.graph_parameters() if ours is not None else dict(module.named_parameters())
        self.named = {name: p for name, p in names.items() if p.requires_grad}
        self.loss: Losses = (lambda x: module(x)[0]) if ours is None else ours.loss
        self.no_sync: Silent = nullcontext if ours is None else ours.no_sync

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained and that the loss reaches."""
        return [p for name, p in self.named.items() if not name.startswith("aside")]

    def whole(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients whole, as they are now."""
        if self.ours is None:
            return {name: value.detach().clone() for name, value in gradients.items()}
        return {name: value.clone() for name, value in self.ours.full_values(gradients).items()}

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that have come so far."""
        return self.whole({name: p.grad for name, p in self.named.items() if p.grad is not None})


Line = Callable[[_Caller, Tensor], list[dict[str, Tensor]]]
LINES: dict[str, Line] = {}


def line(function: Line) -> Line:
    """Name a sequence."""
    LINES[function.__name__.strip("_").replace("_", " ")] = function
    return function


@line
def _one_after_the_other(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    c.loss(x).backward()
    c.loss(2 * x).backward()
    return [c.gradients()]


@line
def _two_calls_then_both_backward(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    first = c.loss(x)
    second = c.loss(2 * x)
    first.backward()
    between = c.gradients()
    second.backward()
    return [between, c.gradients()]


@line
def _the_second_backward_first(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    first = c.loss(x)
    second = c.loss(2 * x)
    second.backward()
    between = c.gradients()
    (3 * first).backward()
    return [between, c.gradients()]


@line
def _a_sum_of_two_losses(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    (c.loss(x) + 0.5 * c.loss(2 * x)).backward()
    return [c.gradients()]


@line
def _a_kept_graph(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    loss = c.loss(x)
    loss.backward(retain_graph=True)
    once = c.gradients()
    (-2 * loss).backward(retain_graph=True)
    loss.backward()
    return [once, c.gradients()]


@line
def _other_gradients_than_guessed(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    results = []
    for scale in (1.0, 8.0, 8.0, 0.0, -0.5, 1.0):
        c.module.zero_grad()
        (scale * c.loss(x)).backward()
        results.append(c.gradients())
    return results


@line
def _behind_a_step_that_went_wrong(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    for scale in (float("nan"), float("inf")):
        (scale * c.loss(x)).backward()
        c.module.zero_grad()
    c.loss(x).backward()
    return [c.gradients()]


@line
def _gradients_asked_for(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    loss = c.loss(x)
    gradients = torch.autograd.grad(3 * loss, c.parameters)
    names = [name for name in c.named if not name.startswith("aside")]
    assert all(p.grad is None for p in c.parameters)
    return [c.whole(dict(zip(names, gradients, strict=True)))]


@line
def _accumulated_without_sums(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    c.loss(x).backward()
    with c.no_sync():
        c.loss(2 * x).backward()
        c.loss(3 * x).backward()
    c.loss(x).backward()
    return [c.gradients()]


@line
def _zeroed_between(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    with c.no_sync():
        c.loss(2 * x).backward()
    c.module.zero_grad()
    c.loss(x).backward()
    first = c.gradients()
    with c.no_sync():
        c.loss(2 * x).backward()
    for p in c.parameters:
        p.grad = None
    c.loss(3 * x).backward()
    return [first, c.gradients()]


@line
def _called_before_what_waits(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    first = c.loss(x)
    second = c.loss(2 * x)
    with c.no_sync():
        first.backward()
    second.backward()
    return [c.gradients()]


@line
def _called_before_shares_that_wait(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    early = c.loss(2 * x)
    with c.no_sync():
        c.loss(x).backward()
    early.backward()
    return [c.gradients()]


@line
def _called_where_nothing_is_summed(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    with c.no_sync():
        first = c.loss(x)
        second = c.loss(2 * x)
        first.backward()
    second.backward()
    return [c.gradients()]


@line
def _steps_of_an_optimizer(c: _Caller, x: Tensor) -> list[dict[str, Tensor]]:
    optimizer = torch.optim.SGD(c.parameters, lr=0.5, momentum=0.9)
    for scale in (1.0, 4.0):
        optimizer.zero_grad()
        (scale * c.loss(x)).backward()
        optimizer.step()
        with torch.no_grad():
            c.loss(x)
    optimizer.zero_grad()
    c.loss(x).backward()
    return [c.gradients()]


def _all_lines(
    plan: Execution | None, module: Net, x: Tensor
) -> dict[str, list[dict[str, Tensor]]]:
    """The results of every sequence."""
    results = {}
    for name, run in LINES.items():
        alone = Net().double()
        alone.load_state_dict(module.state_dict())
        alone.frozen.weight.requires_grad_(False)
        results[name] = run(_Caller(alone, None if plan is None else on_this_rank(plan, module)), x)
    return results


def _require_equal(
    actual: dict[str, list[dict[str, Tensor]]],
    wanted: dict[str, list[dict[str, Tensor]]],
    under: str = "",
) -> None:
    for name, several in wanted.items():
        for mine, theirs in zip(actual[name], several, strict=True):
            assert mine.keys() == theirs.keys(), under + name
            for parameter, value in theirs.items():
                where = f"{under}{name}: {parameter}"
                torch.testing.assert_close(
                    mine[parameter],
                    value,
                    rtol=1e-9,
                    atol=1e-12,
                    msg=lambda text, at=where: f"{at}: {text}",
                )


SCHEDULES = [Schedule(micro_batches=count, **mode) for count in (1, 2) for mode in MODES.values()]


def _under_all(
    plans: list[Execution], module: Net, x: Tensor
) -> list[dict[str, list[dict[str, Tensor]]]]:
    return [_all_lines(plan, module, x) for plan in plans]


@pytest.fixture(params=[True, False], ids=["read", "unread"])
def gradient_of_loss(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the loss on the host, or on a device that the host does not wait for."""
    monkeypatch.setattr(autograd_node, "is_on_host", lambda value: request.param)


def test_as_on_one_device(strict_collectives: None, gradient_of_loss: None) -> None:
    """On two ranks that split the batch, parameters stored split, under every schedule."""
    module, analysis, x = net()
    plans = [planned(analysis, (2,), schedule=schedule) for schedule in SCHEDULES]
    wanted = _all_lines(None, module, x)
    for each in run_ranks(_under_all, 2, plans, module, x, timeout=240.0):
        for schedule, actual in zip(SCHEDULES, each, strict=True):
            _require_equal(
                actual,
                wanted,
                f"{schedule.micro_batches} {schedule.gathered} {schedule.accumulated}: ",
            )


@pytest.mark.parametrize("sizes", [((1,), (1,)), ((2,), (1,))])
def test_in_stages(
    sizes: tuple[tuple[int, ...], ...], strict_collectives: None, gradient_of_loss: None
) -> None:
    module, analysis, x = net()
    plan = pipelined(analysis, sizes)
    wanted = _all_lines(None, module, x)
    for actual in run_ranks(_all_lines, plan.devices, plan, module, x, timeout=120.0):
        _require_equal(actual, wanted)


@pytest.fixture(params=[1, 2])
def ours(request: pytest.FixtureRequest) -> tuple[ParallelModule, Tensor]:
    """On one device, with one micro-batch or two."""
    module, analysis, x = net()
    return on_this_rank(
        planned(analysis, (1,), split=False, schedule=Schedule(micro_batches=request.param)), module
    ), x


def test_a_graph_that_is_not_kept_runs_once(ours: tuple[ParallelModule, Tensor]) -> None:
    module, x = ours
    loss = module.loss(x)
    loss.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_a_parameter_that_has_changed_since_the_call_is_an_error(
    ours: tuple[ParallelModule, Tensor],
) -> None:
    module, x = ours
    loss = module.loss(x)
    with torch.no_grad():
        module.graph_parameters()["last.weight"].mul_(2)
    with pytest.raises(
        RuntimeError,
        match=r"'last.weight' has been changed between the forward and the backward pass",
    ):
        loss.backward()  # type: ignore[no-untyped-call]


def test_without_gradients_nothing_is_kept(ours: tuple[ParallelModule, Tensor]) -> None:
    module, x = ours
    with torch.no_grad():
        assert not module.loss(x).requires_grad
    with CollectiveLog() as log, torch.no_grad():
        module.loss(x)
    assert {action.word for action in log.actions} <= {"F", "UNSHARD", "RESHARD"}
    for parameter in module.graph_parameters().values():
        parameter.requires_grad_(False)
    assert not module.loss(x).requires_grad


# --- float16 ---


class _Small(nn.Module):
    """A loss whose gradients are lost in float16, unless they are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Too small by a factor of 4096."""
        return (self.last(torch.tanh(self.first(x))) / 64).square().mean()


def test_of_float16_the_order_runs_again_for_another_scale() -> None:
    """A gradient that has underflowed under the guessed scale is there under the given one, and the
    next call guesses that.
    """
    torch.manual_seed(0)
    module = _Small().half()
    x = torch.randn(8, 8).half()
    analysis = analyse(load_model(module, ModelOptions(train=True), (x,)).graph, train=True)
    alone: Any = planned(analysis, (1,), split=False, schedule=Schedule(micro_batches=2))
    module_ours = on_this_rank(alone, module)
    exact = _Small().double()
    exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    scale = 4096.0
    runs = []
    for _ in range(2):
        module_ours.zero_grad()
        with CollectiveLog() as log:
            (module_ours.loss(x).float() * scale).backward()
        runs.append(sum(action.word == "F" for action in log.actions))
    assert runs[0] == 2 * runs[1]
    (exact(x.double()) * scale).backward()
    for name, parameter in exact.named_parameters():
        mine = module_ours.graph_parameters()[name].grad
        assert mine is not None and parameter.grad is not None
        torch.testing.assert_close(
            mine.double(), parameter.grad, rtol=0.05, atol=1e-3 * float(parameter.grad.abs().max())
        )
