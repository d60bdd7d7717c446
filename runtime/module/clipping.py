"""Clipping by the norm of all gradients, whichever ranks hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime.execution.engine import Engine
from autopar.runtime.parameters.storage import local_of
from autopar.sharding.layout import Kind

Parameters = Mapping[str, nn.Parameter]
"""This rank's parameters by their names in the graph."""


def clip_grad_norm(
    engine: Engine, parameters: Parameters, max_norm: float, norm_type: float
) -> Tensor:
    """Scale all gradients to a norm of at most `max_norm`; return the norm before, whole on every
    rank.
    """
    largest = math.isinf(norm_type)
    norms = [
        # In double precision, since squares of float16 gradients overflow.
        torch.linalg.vector_norm(gradient.double(), norm_type)
        for gradient in counted_gradients(engine, parameters)
    ]
    # A rank that counts no gradient takes part in the collective all the same.
    each = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.double)
    total = each.max() if largest else (each**norm_type).sum()
    total = total.to(engine.device)
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
        if parameter.grad is not None and _counts_here(engine, name)
    ]


def _counts_here(engine: Engine, name: str) -> bool:
    """Whether this rank's shard of a gradient is one that no other rank counts."""
    if engine.world.groups is None:
        return False
    storages = {number: chunk.stored for number, chunk in enumerate(engine.execution.chunks)}
    # Several stages may hold a tied parameter: the first of them counts it.
    first = next(number for number, storage in storages.items() if name in storage)
    if first not in engine.stages:
        return False
    # Along an axis that does not split the parameter all ranks have equal copies: rank 0 counts.
    return all(
        placement.kind is Kind.SPLIT or coordinate == 0
        for coordinate, placement in zip(
            engine.groups.coordinate, storages[first][name], strict=True
        )
    )
