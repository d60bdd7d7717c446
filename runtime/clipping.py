"""Clipping by the norm of all gradients, whichever ranks hold them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.sharding.layout import Kind

from .parameters import local_of

if TYPE_CHECKING:
    from .module import ParallelModule


def clip_grad_norm(module: ParallelModule, max_norm: float, norm_type: float) -> Tensor:
    """Scale all gradients to a norm of at most `max_norm`; return the norm before, whole on every rank."""
    engine = module.engine
    held = [(name, local_of(p.grad)) for name, p in module.graph_parameters().items() if p.grad is not None]
    each = [torch.linalg.vector_norm(gradient.double(), norm_type) for gradient in counted_gradients(module)]
    norms = torch.stack(each) if each else torch.zeros(1, dtype=torch.double)
    largest = math.isinf(norm_type)
    total = (norms.max() if largest else (norms**norm_type).sum()).to(engine.device)
    if dist.is_initialized() and engine.world.size > 1:
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    norm = total if largest else total ** (1.0 / norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for _, gradient in held:
        gradient.mul_(scale.to(gradient.dtype))
    return norm


def counted_gradients(module: ParallelModule) -> list[Tensor]:
    """This rank's shards of gradients, without copies that another rank counts."""
    held = ((name, p.grad) for name, p in module.graph_parameters().items() if p.grad is not None)
    return [local_of(gradient) for name, gradient in held if _counts_here(module, name)]


def _counts_here(module: ParallelModule, name: str) -> bool:
    """Whether this rank's shard of a gradient is one that no other rank counts."""
    engine = module.engine
    if engine.world.groups is None:
        return False
    holders = [n for n, chunk in enumerate(engine.execution.chunks) if name in chunk.whole.program.assignment.storage]
    if holders[0] not in engine.stages:
        return False
    layout = engine.execution.chunks[holders[0]].whole.program.assignment.storage[name]
    whole = (c for c, placement in zip(engine.groups.coordinate, layout, strict=True) if placement.kind is not Kind.SPLIT)
    return all(coordinate == 0 for coordinate in whole)
