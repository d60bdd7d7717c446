"""Clipping by the norm of all gradients, whichever ranks hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.runtime.execution.engine import Engine
from autopar.runtime.parameters.storage import local_of

Parameters = Mapping[str, nn.Parameter]
"""This rank's parameters by their names in the graph."""


def clip_grad_norm(
    engine: Engine, parameters: Parameters, max_norm: float, norm_type: float
) -> Tensor:
    """Scale the gradients of parameters to a norm of at most `max_norm`.

    Returns the norm before, whole on every rank.
    """
    if not norm_type > 0:
        raise UsageError(
            f"norm_type is {norm_type}; gradients are clipped by a norm above 0, or by math.inf"
        )
    largest = math.isinf(norm_type)
    each = norms_of(counted_gradients(engine, parameters), norm_type, engine.device)
    total = each.max() if largest else (each**norm_type).sum()
    if dist.is_initialized() and engine.world.size > 1:
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    norm = total if largest else total ** (1.0 / norm_type)
    # The small number is torch's own, so that clipped gradients equal those of one device.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters.values():
        if parameter.grad is not None:
            gradient = local_of(parameter.grad)
            gradient.mul_(scale.to(gradient.dtype))
    return norm


def counted_gradients(engine: Engine, parameters: Parameters) -> list[Tensor]:
    """This rank's shards of gradients, without copies that another rank counts."""
    return [
        local_of(parameter.grad)
        for name, parameter in parameters.items()
        if parameter.grad is not None and name in engine.storages.counted
    ]


def norms_of(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """A zero, then the norms of all gradients with elements, in double precision.

    `device`: that of the gradients.
    """
    norms: list[Tensor] = [torch.zeros((), dtype=torch.double, device=device)]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        # Squares of float16 gradients would overflow.
        wide = torch.promote_types(dtype, torch.float32)
        alike = [value for value in gradients if value.dtype is dtype and value.numel()]
        norms += torch._foreach_norm(alike, norm_type, dtype=wide) if alike else ()
    return torch.stack([norm.double() for norm in norms])
