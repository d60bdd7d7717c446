"""Parameters that several stages hold: each stage's summed gradients are summed over the stages.

If the stages store such a parameter in one layout, ranks of equal coordinates sum their shards. Otherwise every stage
gathers its gradient whole, one rank of each stage adds it, and every rank takes its shard of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.order.execution import Execution
from autopar.order.ranks import tied_parameters
from autopar.sharding.layout import Layout

from .collectives import AxisGroup, all_reduce, cuts_of, shard_of
from .groups import group_of
from .redistribution import gather_full
from .units import Gradients, Stored
from .world import World


class TiedSums:
    """The sums over stages that this rank has a part in."""

    def __init__(self, execution: Execution, world: World, stored: Stored) -> None:
        self.execution, self.world, self.stored = execution, world, stored
        found = tied_parameters(execution).items()
        self.tied = {name: stages for name, stages in found if world.stage in stages}
        for name, stages in self.tied.items():  # groups are made before the first step, at the same point on every rank
            self._group(name, stages)

    def sum(self, gradients: Mapping[int, Gradients]) -> None:
        """Sum the gradients of this rank's chunks, in place of those of the first chunk that holds each parameter."""
        with torch.no_grad():
            for name, stages in self.tied.items():
                held = [(number, self._layout(number, name)) for number in gradients if self._holds(number, name)]
                own = [gradient for number, layout in held if (gradient := gradients[number].take((name, layout))) is not None]
                mine = own[0] if own else torch.zeros_like(self.stored(name), dtype=self._dtype(name))
                for other in own[1:]:
                    mine = mine + other
                number, layout = held[0]
                gradients[number].add((name, layout), self._summed(name, stages, mine, layout))

    def _holds(self, number: int, name: str) -> bool:
        return name in self.execution.chunks[number].whole.program.assignment.storage

    def _dtype(self, name: str) -> torch.dtype:
        """The type in which the gradient travels."""
        found: torch.dtype = getattr(torch, self.execution.schedule.types.reduced(self.execution.graph.tensors[name]))
        return found

    def _layout(self, number: int, name: str) -> Layout:
        return self.execution.chunks[number].whole.program.assignment.storage[name]

    def _holder(self, stage: int, name: str) -> int:
        chunks = range(stage, len(self.execution.chunks), self.execution.stages)
        return next(number for number in chunks if self._holds(number, name))

    def _alike(self, name: str, stages: tuple[int, ...]) -> bool:
        holders = [self._holder(stage, name) for stage in stages]
        shapes = {self.execution.chunks[number].mesh.shape for number in holders}
        return len({self._layout(number, name) for number in holders}) == 1 and len(shapes) == 1

    def _group(self, name: str, stages: tuple[int, ...]) -> AxisGroup:
        world, stage = self.world, self.world.stage
        assert stage is not None
        if self._alike(name, stages):
            members = [world.firsts[s] + world.rank - world.firsts[stage] for s in stages]
        else:
            sizes = [self.execution.chunks[s].mesh.devices for s in stages]
            members = sorted(world.firsts[s] + i for s, size in zip(stages, sizes, strict=True) for i in range(size))
        group: dist.ProcessGroup = group_of(members)
        return AxisGroup(str(group.group_name), len(members), members.index(world.rank))

    def _summed(self, name: str, stages: tuple[int, ...], gradient: Tensor, layout: Layout) -> Tensor:
        group, groups = self._group(name, stages), self.world.groups
        assert groups is not None and self.world.stage is not None
        if self._alike(name, stages):
            return all_reduce(gradient, group)
        whole = gather_full(gradient, layout, groups)
        first = self.world.rank == self.world.firsts[self.world.stage]
        total = all_reduce(whole if first else torch.zeros_like(whole), group)
        return shard_of(total, cuts_of(layout, groups.mesh.shape, groups.coordinate)).contiguous()
