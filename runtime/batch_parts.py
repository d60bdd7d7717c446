"""Batches that come in parts: each rank of a stage is given its own, and all of them together are the batch of a call.

The parts are gathered before the program begins, so that it runs as it was planned whatever it reads of its inputs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.ir import Tensor as Wanted

from .collectives import MOVABLE
from .groups import group_of
from .present import aside
from .world import World


class BatchParts:
    """Joins the parts of a stage's ranks, in the order of these."""

    def __init__(self, graph: Graph, world: World) -> None:
        if world.groups is None:
            raise PlanError("a rank that the plan leaves idle has no part of a batch; give every rank all of it (full_batch=True)")
        self.count, self.first = world.groups.mesh.devices, world.groups.first
        shapes = [graph.tensors[name].shape for name in graph.inputs]
        self.batch = next((shape[0] for shape in shapes if shape), 0)
        if self.batch % self.count:
            raise PlanError(f"a batch of {self.batch} does not divide into {self.count} equal parts; plan with one that does")

    def joined(self, value: Tensor, wanted: Wanted) -> Tensor:
        """The whole of an input from this rank's part; inputs that do not run over the batch come whole."""
        if not wanted.shape or wanted.shape[0] != self.batch or self.count == 1:
            return value
        part = (self.batch // self.count, *wanted.shape[1:])
        if tuple(value.shape) != part:
            raise PlanError(
                f"input {wanted.name!r} has the shape {list(value.shape)}; each of {self.count} ranks is given its part, {list(part)} "
                "(full_batch=True: each is given all of it)"
            )
        return _gathered(value, range(self.first, self.first + self.count))


def _gathered(value: Tensor, ranks: range) -> Tensor:
    own = value.detach().contiguous()
    flat = own if own.dtype in MOVABLE else own.reshape(own.shape[0], -1).view(torch.uint8)
    out = flat.new_empty(flat.shape[0] * len(ranks), *flat.shape[1:])
    with aside():
        dist.all_gather_single(out, flat, group=group_of(ranks))
    return out.view(own.dtype).view(out.shape[0], *own.shape[1:])
