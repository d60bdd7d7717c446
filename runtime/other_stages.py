"""Gradients of other stages, as far as a rank must know them: their norm, and whether they are all finite.

A rank holds the parameters of its own stage. Code that looks at all gradients at once, to clip them by their norm or to
skip a step that overflowed, would see only one stage. So `parameters()` of a module with stages ends with one more
parameter. Its gradient has the Euclidean norm, and the largest element, of all gradients of the other stages. If some
of these are not finite, neither is it, nor one of this rank's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .clipping import counted_gradients
from .parameters import local_of

if TYPE_CHECKING:
    from .module import ParallelModule

PLACES = 1 << 16
"""Elements of the parameter.

Its gradient has the largest of the others' elements and their Euclidean norm. That norm is right as long as the largest
element is at least the norm divided by the square root of this number.
"""


class OtherStages:
    """The parameter that represents those of other stages."""

    def __init__(self, module: ParallelModule) -> None:
        own = list(module.graph_parameters().values())
        like = own[0] if own else torch.zeros(1)
        value: Tensor = torch.zeros(PLACES, dtype=like.dtype, device=module.engine.device)
        if isinstance(like, DTensor):
            value = module.engine.replicated(value)
        self.parameter = nn.Parameter(value)

    def look(self, module: ParallelModule) -> None:
        """Set the gradient, once all gradients of a backward pass are reduced (collective: every rank calls it)."""
        squares = [g.double().square().sum() for g in counted_gradients(module)]
        device = module.engine.device
        own = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.double, device=device)
        stages = module.engine.world.firsts
        world = module.engine.world
        here = len(stages) if world.stage is None else world.stage
        each = torch.zeros(2, len(stages) + 1, world.size, dtype=torch.double, device=device)  # squares, and the largest of every rank
        each[0, here, world.rank] = own
        each[1, here, world.rank] = max((float(g.abs().max()) for g in counted_gradients(module) if g.numel()), default=0.0)
        dist.all_reduce(each)
        each[:, here] = 0.0
        norm, largest = each[0].sum().sqrt(), each[1].max()
        rest = ((each[0].sum() - largest**2).clamp(min=0.0) / (PLACES - 1)).sqrt()
        gradient = torch.cat([largest.reshape(1), rest.expand(PLACES - 1)]).to(self.parameter.dtype)
        self.parameter.grad = module.engine.replicated(gradient) if isinstance(self.parameter, DTensor) else gradient
        mine = next((p.grad for p in module.graph_parameters().values() if p.grad is not None), None)
        if mine is not None and not bool(torch.isfinite(norm)):
            local_of(mine).view(-1)[:1] = float("nan")
