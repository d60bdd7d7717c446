"""A small network in pipeline stages: the same work on ranks and on one device, to be compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.frontends.load import ModelOptions, load_model
from autopar.order.execution import Execution
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.sharding.analysis import analyse
from tests.runtime.nets import Net, on_this_rank, pipelined, whole_gradients

Sizes = Sequence[tuple[int, ...]]
# A weight that two stages hold, one that is frozen, and one that the loss does not reach are in the
# network itself.
PLANS: Mapping[str, tuple[Sizes, Mapping[str, Any], int]] = {
    "two stages": (((1,), (1,)), {}, 2),
    "three stages": (((1,), (1,), (1,)), {}, 3),
    "an idle rank": (((1,), (1,)), {}, 3),
    "split parameters": (((2,), (1,)), {}, 3),
    "interleaved": (((1,), (1,)), {"pipeline": "interleaved", "interleave": 2}, 2),
}
"""Meshes of the stages, the schedule, and the number of ranks."""


@functools.cache
def network(dtype: torch.dtype = torch.float64) -> Net:
    """The network, with weights by a seed."""
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(dtype: torch.dtype = torch.float64, number: int = 1) -> Tensor:
    """An input."""
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(number)).to(dtype)


@functools.cache
def plan(name: str, dtype: torch.dtype = torch.float64) -> Execution:
    """A plan of the network."""
    sizes, options, _ = PLANS[name]
    model = load_model(network(dtype), ModelOptions(train=True), (batch(dtype),))
    return pipelined(analyse(model.graph, train=True), sizes, **options)


def loss_of(module: Any, x: Tensor) -> Tensor:
    """The loss, of the planned module or of the original."""
    loss: Tensor = module.loss(x) if isinstance(module, ParallelModule) else module(x)[0]
    return loss


Work = Callable[[Any], Any]


def _on_rank(execution: Execution, work: Work, module: Net) -> Any:
    return work(on_this_rank(execution, module))


def on_ranks(name: str, work: Work, dtype: torch.dtype = torch.float64) -> list[Any]:
    """The results of all ranks."""
    count = PLANS[name][2]
    return run_ranks(_on_rank, count, plan(name, dtype), work, network(dtype), timeout=120)


def alone(work: Work, dtype: torch.dtype = torch.float64) -> Any:
    """The result of one device."""
    module = Net().to(dtype)
    module.load_state_dict(network(dtype).state_dict())
    module.frozen.weight.requires_grad_(False)
    return work(module)


def whole(value: Any) -> Any:
    """A result without DTensors."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """All gradients, whole."""
    if isinstance(module, ParallelModule):
        return whole_gradients(module)
    return {name: value.grad for name, value in module.named_parameters()}


def weights(module: nn.Module) -> dict[str, Tensor]:
    """All weights, whole."""
    if isinstance(module, ParallelModule):
        return module.full_values(module.graph_parameters())
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def require_alike(actual: Any, wanted: Any, rtol: float = 1e-9) -> None:
    """The same structure of the same numbers."""
    torch.testing.assert_close(actual, wanted, rtol=rtol, atol=1e-12)
