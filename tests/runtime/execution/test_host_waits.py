"""In a step the host reads no tensor that a device computes: it would wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.order.execution import Execution
from autopar.runtime.compression.adamw import SmallAdamW
from autopar.runtime.execution import autograd_node
from autopar.runtime.launch import run_ranks
from autopar.runtime.module import gradients_elsewhere
from autopar.runtime.module.batches import FIRST
from autopar.runtime.optimizers.lamb_momentum import Lamb
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.storage import local_of
from autopar.runtime.ranks.agreement import first_rank_says
from autopar.sharding.analysis import Analysis
from autopar.sharding.schedule import Schedule
from tests.runtime.nets import Net, net, on_this_rank, pipelined, planned

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
}


class _Reads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function in READS
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "read",
    [lambda x: float(x.sum()), lambda x: bool(x.all()), torch.nonzero, lambda x: x[0].item()],
    ids=["float", "bool", "nonzero", "item"],
)
def test_reads_are_counted(read: Callable[[Tensor], object]) -> None:
    with _Reads() as reads:
        read(torch.ones(3))
    assert reads.count


def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for reader in (autograd_node, gradients_elsewhere):
        monkeypatch.setattr(reader, "is_on_host", lambda value: False)


def _plan(analysis: Analysis, stages: int) -> Execution:
    if stages == 2:
        return pipelined(analysis, ((1,), (1,)))
    return planned(analysis, (2,), schedule=Schedule(micro_batches=2))


Optimizer = Callable[[list[Any]], torch.optim.Optimizer]


def _steps(plan: Execution, module: Net, x: Tensor, optimizer: Optimizer) -> int:
    """The numbers that are read in a step whose batch is not compared any more.

    Counters of steps are on the host, where torch's optimizers have them.
    """
    ours = on_this_rank(plan, module)
    stepper = optimizer([p for p in ours.parameters() if p.requires_grad])

    def step() -> int:
        with _Reads() as reads:
            (2.0 * ours.loss(x)).backward()
            ours.clip_grad_norm_(1.0)
        with _Reads() as counters:
            stepper.step()
        ours.zero_grad()
        trained = sum(len(group["params"]) for group in stepper.param_groups)
        return reads.count + max(0, counters.count - trained)

    return [step() for _ in range(FIRST + 1)][-1]


@pytest.mark.parametrize(
    ("stages", "optimizer"), [(1, SmallAdamW), (1, Lamb), (2, SmallAdamW), (2, torch.optim.AdamW)]
)
def test_a_step_reads_nothing(
    stages: int, optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_on_a_device(monkeypatch)
    module, analysis, x = net()
    plan = _plan(analysis, stages)
    assert run_ranks(_steps, 2, plan, module, x, optimizer, timeout=120) == [0, 0]


Backward = Callable[[Tensor], None]


def _hooked(hook: Callable[[Tensor], Tensor | None]) -> Backward:
    def backward(loss: Tensor) -> None:
        loss.register_hook(hook)
        loss.backward()  # type: ignore[no-untyped-call]

    return backward


BACKWARDS: dict[str, tuple[float, bool, Backward]] = {
    "plain": (1.0, False, lambda loss: loss.backward()),
    "scaled": (2.0, True, lambda loss: (2.0 * loss).backward()),
    "given": (3.0, True, lambda loss: loss.backward(torch.tensor(3.0).to(loss))),
    "by a function": (1.0, True, lambda loss: torch.autograd.backward([loss])),
    "hooked": (4.0, True, _hooked(lambda gradient: 4 * gradient)),
    "hooked in place": (5.0, True, _hooked(lambda gradient: gradient.mul_(5) and None)),
}


def _passes(plan: Execution, module: Net, x: Tensor, row: str) -> tuple[int, float]:
    """The passes over gradients behind the call, and what one of them is multiplied by."""
    ours = on_this_rank(plan, module)
    ours.loss(x).backward()  # type: ignore[no-untyped-call]
    mine = next(p for p in ours.graph_parameters().values() if p.grad is not None)
    once = local_of(mine.grad).clone()
    ours.zero_grad()
    scaled: list[object] = []
    # The rank is a process of its own.
    scale = Gradients.scale
    Gradients.scale = lambda own, factor: scaled.append(own) or scale(own, factor)  # type: ignore
    BACKWARDS[row][2](ours.loss(x))
    return len(scaled), float((local_of(mine.grad) / once).mean())


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("row", BACKWARDS)
def test_gradients_of_a_plain_backward_pass_are_not_touched(
    row: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_on_a_device(monkeypatch)
    module, analysis, x = net()
    wanted, touched, _ = BACKWARDS[row]
    plan = _plan(analysis, stages)
    for passes, factor in run_ranks(_passes, 2, plan, module, x, row, timeout=120):
        assert passes == touched and factor == pytest.approx(wanted)


def _told() -> list[int]:
    """Numbers that rank 0 tells, where ranks compute on the CPU and elsewhere."""
    mine = 2**61 + 1 + dist.get_rank()
    return [first_rank_says(mine, device=device) for device in ("cpu", "meta", "meta")]


def test_seeds_travel_between_hosts() -> None:
    """A seed is read at once, so it takes no part in the queue of a device."""
    assert run_ranks(_told, 2, timeout=60) == [[2**61 + 1] * 3] * 2
