"""Cuts on numbers of devices that are no power of two: which mesh they get, and that the ranks
compute what one device does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.integrations.mindspore.context.marks import Cuts
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks

DEVICES = 6
X = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Two products and a softmax, each of which may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 18)
        self.b = nn.Linear(18, 6)
        self.m = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        output: Tensor = self.m(self.b(torch.tanh(self.a(x)))).square().mean()
        return output


CASES: list[tuple[str, dict[str, Cuts], tuple[int, ...], dict[str, set[str]]]] = [
    (
        "semi_auto_parallel",
        {"a": ((3, 1), (1, 1))},
        (3, 2),
        {"a/linear": {"d0", "B"}},
    ),  # pairs of devices hold copies
    (
        "semi_auto_parallel",
        {"a": ((2, 1), (3, 1)), "b": ((2, 3), (1, 3))},
        (2, 3),
        {"a/linear": {"d0", "n"}, "b/linear": {"d0", "k"}},
    ),
    (
        "semi_auto_parallel",
        {"a": ((6, 1), (1, 1), (1,)), "b": ((1, 1), (6, 1), (6,))},
        (6,),
        {"a/linear": {"d0"}, "b/linear": {"n"}},
    ),
    ("auto_parallel", {"a": ((1, 3), (2, 3))}, (2, 3), {"a/linear": {"n", "k"}}),
    ("auto_parallel", {"m": ((3, 1),)}, (2, 3), {"m/softmax": {"d0", "R"}}),
]
"""The mode, the cuts of modules, the mesh that has room for them, and the strategies of their
operators.
"""


def _net(cuts: dict[str, Cuts]) -> nn.Module:
    torch.manual_seed(0)
    net = Net().double()
    for path, one in cuts.items():
        autopar.shard(net.get_submodule(path), one)
    return net


def _planned(mode: str, cuts: dict[str, Cuts]) -> Plan:
    autopar.reset_auto_parallel_context()
    autopar.set_auto_parallel_context(parallel_mode=mode, device_num=DEVICES, full_batch=True)
    return autopar.plan(_net(cuts), (X,), cluster="local-cpu", optimizer="sgd")


@pytest.mark.parametrize("case", CASES[:1] + CASES[3:4], ids=lambda case: "-".join(case[1]))
def test_cuts_on_six_devices_lie_on_axes_of_their_own(case: Any) -> None:
    mode, cuts, mesh, strategies = case
    plan = _planned(mode, cuts)
    assert plan.devices == DEVICES and sorted(plan.mesh_.shape) == sorted(mesh)
    assert {name: set(plan.operators[name].strategy) for name in strategies} == strategies


class Block(nn.Module):
    """A product among operators that take inputs of as many dims."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        """A residual block."""
        y: Tensor = self.layer(x * x)
        return y + x


def test_of_a_module_its_product_is_meant() -> None:
    autopar.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=2)
    net = nn.Sequential(autopar.shard(Block(), ((1, 1), (2, 1))))
    plan = autopar.plan(net, (torch.ones(12, 12),), cluster="local-cpu", mode="infer")
    (product,) = (op for op in plan.operators.values() if "linear" in op.kind)
    assert product.strategy == ("n",)


@pytest.mark.slow
@pytest.mark.ci
def test_six_ranks_compute_what_one_device_does() -> None:
    plans = [_planned(mode, cuts) for mode, cuts, _, _ in CASES]
    for plan, (_, _, mesh, strategies) in zip(plans, CASES, strict=True):
        assert (
            sorted(plan.mesh_.shape) == sorted(mesh)
            and {n: set(plan.operators[n].strategy) for n in strategies} == strategies
        )
    alone = _net({})
    alone(X).backward()
    wanted = {name: value.grad for name, value in alone.named_parameters()}

    def work() -> float:
        worst = 0.0
        for plan, (mode, cuts, _, _) in zip(plans, CASES, strict=True):
            autopar.set_auto_parallel_context(
                parallel_mode=mode, device_num=DEVICES, full_batch=True
            )
            module = autopar.parallelize(_net(cuts), plan)
            module.loss(X).backward()  # type: ignore[no-untyped-call]
            for name, value in module.named_parameters():
                assert value.grad is not None
                whole = value.grad.full_tensor() if isinstance(value.grad, DTensor) else value.grad
                worst = max(worst, float((whole - wanted[name]).abs().max()))
        return worst

    assert max(run_ranks(work, DEVICES, timeout=180)) < 1e-15
