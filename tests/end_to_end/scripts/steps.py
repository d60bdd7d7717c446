"""Helpers that the scripts share: ordinary steps, and the whole values of parameters, gradients and
states after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.end_to_end.scripts.models import batch
from tests.end_to_end.scripts.table import Values

Inputs = Callable[[int], tuple[Tensor, ...]]
WEIGHT = "weight "
"""How the names of values begin that a rank lacks where the parameter lies on another stage."""


def rank() -> int:
    """The number of this rank."""
    return dist.get_rank()


def whole(value: Tensor) -> Tensor:
    """A copy of the whole tensor; a collective call for one that is spread over ranks."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().clone()


def weights(module: nn.Module, prefix: str = "") -> dict[str, Tensor | float]:
    """The whole weights by name."""
    return {
        f"{WEIGHT}{prefix}{name}": whole(parameter) for name, parameter in module.named_parameters()
    }


def buffers(module: nn.Module) -> dict[str, Tensor | float]:
    """The whole buffers by name."""
    return {f"{WEIGHT}{name}": whole(buffer) for name, buffer in module.named_buffers()}


def gradients(module: nn.Module) -> dict[str, Tensor | float]:
    """The whole gradients by name; those that are not there are numbers."""
    by_name = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {
        f"{WEIGHT}gradient {name}": whole(grad) if grad is not None else -1.0
        for name, grad in by_name.items()
    }


def adamw(parameters: Iterable[Tensor], rate: float = 1e-2) -> Optimizer:
    """The optimizer that most scripts use."""
    return torch.optim.AdamW(parameters, lr=rate)


def sgd(parameters: Iterable[Tensor], rate: float = 0.1) -> Optimizer:
    """For scripts in which a wrong scale of the gradients must show."""
    return torch.optim.SGD(parameters, lr=rate)


def step(module: nn.Module, optimizer: Optimizer, inputs: tuple[Tensor, ...]) -> float:
    """One ordinary step; its loss."""
    optimizer.zero_grad()
    loss = module(*inputs)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def steps(
    module: nn.Module,
    optimizer: Optimizer,
    *,
    start: int = 0,
    count: int = 2,
    inputs: Inputs = batch,
) -> dict[str, Tensor | float]:
    """Some ordinary steps; their losses."""
    return {
        f"loss {number}": step(module, optimizer, inputs(number))
        for number in range(start, start + count)
    }


def trained(
    module: nn.Module,
    *,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = adamw,
    count: int = 2,
    inputs: Inputs = batch,
) -> Values:
    """Losses of ordinary steps and the weights after them."""
    return steps(module, optimizer(module.parameters()), count=count, inputs=inputs) | weights(
        module
    )


def unsummed(module: nn.Module) -> AbstractContextManager[object]:
    """`module.no_sync()` where it has one."""
    no_sync = getattr(module, "no_sync", nullcontext)
    manager: AbstractContextManager[object] = no_sync()
    return manager


def is_original(module: nn.Module) -> bool:
    """Whether no plan runs it."""
    return not hasattr(module, "no_sync")
