"""Parameters that several stages hold: the gradients that each stage has summed are summed over the stages.

Where the stages store such a parameter alike, ranks of equal coordinates sum their shards. Otherwise every stage makes its gradient whole, one
rank of each adds it, and every rank takes its shard of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import cuts_of, gather_full, group_of, shard_of

if TYPE_CHECKING:
    from .engine import Engine


def sum_tied(engine: Engine, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of this rank's shards, those of tied parameters summed over their stages."""
    summed = dict(found)
    for name, stages in engine.tied.items():
        if engine.world.stage in stages:
            summed[name] = _sum(engine, name, stages, found.get(name))
    return summed


def _sum(engine: Engine, name: str, stages: tuple[int, ...], gradient: Tensor | None) -> Tensor:
    execution, world, groups = engine.execution, engine.world, engine.groups
    assert world.stage is not None
    chunks = [next(c for c in execution.chunks[s :: execution.stages] if name in c.whole.program.assignment.storage) for s in stages]
    layouts = [chunk.whole.program.assignment.storage[name] for chunk in chunks]
    tensor, layout = engine.graph.tensors[name], layouts[stages.index(world.stage)]
    own = world.rank - world.firsts[world.stage]
    if gradient is None:
        gradient = torch.zeros_like(engine.stored(name))
    if len(set(layouts)) == 1 and len({chunk.mesh.shape for chunk in chunks}) == 1:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group_of([world.firsts[stage] + own for stage in stages]))
        return total
    whole = gather_full(gradient, layout, groups).contiguous()
    total = whole if own == 0 else torch.zeros(tensor.shape, dtype=whole.dtype, device=whole.device)
    members = [world.firsts[stage] + i for stage, chunk in zip(stages, chunks, strict=True) for i in range(chunk.mesh.devices)]
    dist.all_reduce(total, group=group_of(sorted(members)))
    return shard_of(total, cuts_of(layout, groups.mesh.shape, groups.coordinate)).contiguous()
