"""Parameters that several stages hold, whose gradients are summed over these stages.

If the stages store such a parameter in one layout, ranks of equal coordinates sum their shards.
Otherwise every stage gathers its gradient whole, one rank of each stage adds it, and every rank
takes its shard of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.order.execution import Execution
from autopar.order.ranks import tied_parameters
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.units import Stored
from autopar.runtime.ranks.collectives import all_reduce
from autopar.runtime.ranks.cuts import cuts_of, shard_of
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.runtime.ranks.process_groups import group_of
from autopar.runtime.ranks.world import World
from autopar.runtime.redistribution.steps import gather_full
from autopar.sharding.layout import Layout


class TiedSums:
    """The sums over stages that this rank has a part in."""

    def __init__(self, execution: Execution, world: World, stored: Stored) -> None:
        self.execution = execution
        self.world = world
        self.stored = stored
        self.tied = {
            name: stages
            for name, stages in tied_parameters(execution).items()
            if world.stage in stages
        }
        # Groups are made before the first step, at the same point on every rank.
        for name, stages in self.tied.items():
            self._group(name, stages)

    def sum(self, gradients: Mapping[int, Gradients]) -> None:
        """Sum the gradients of this rank's chunks over the stages.

        The first chunk that holds a parameter gets the sum; the others have none any more.
        """
        with torch.no_grad():
            for name, stages in self.tied.items():
                # All stages take the parameters in the order of the plan: a sum waits for its like.
                holders = [number for number in gradients if self._holds(number, name)]
                share = self._taken(name, holders, gradients)
                layout = self._layout(holders[0], name)
                total = self._summed(name, stages, share, layout)
                gradients[holders[0]].add((name, layout), total)

    def _taken(
        self, name: str, holders: Sequence[int], gradients: Mapping[int, Gradients]
    ) -> Tensor:
        """The sum of a parameter's gradients in this rank's chunks, taken away from there."""
        share: Tensor | None = None
        for number in holders:
            gradient = gradients[number].take((name, self._layout(number, name)))
            if gradient is not None:
                share = gradient if share is None else share + gradient
        if share is None:
            # The other stages wait for this rank in the sum, whether the loss reaches it or not.
            share = torch.zeros_like(self.stored(name), dtype=self._dtype(name))
        return share

    def _holds(self, number: int, name: str) -> bool:
        return name in self.execution.chunks[number].stored

    def _dtype(self, name: str) -> torch.dtype:
        """The type in which the gradient travels."""
        types = self.execution.schedule.types
        dtype: torch.dtype = getattr(torch, types.reduced(self.execution.graph.tensors[name]))
        return dtype

    def _layout(self, number: int, name: str) -> Layout:
        return self.execution.chunks[number].stored[name]

    def _holder(self, stage: int, name: str) -> int:
        chunks = range(stage, len(self.execution.chunks), self.execution.stages)
        return next(number for number in chunks if self._holds(number, name))

    def _alike(self, name: str, stages: tuple[int, ...]) -> bool:
        """Whether all stages hold a parameter in one layout on meshes of one shape."""
        holders = [self._holder(stage, name) for stage in stages]
        shapes = {self.execution.chunks[number].mesh.shape for number in holders}
        return len({self._layout(number, name) for number in holders}) == 1 and len(shapes) == 1

    def _group(self, name: str, stages: tuple[int, ...]) -> AxisGroup:
        """The ranks over which this rank sums a parameter's gradient."""
        world = self.world
        stage = self.world.stage
        assert stage is not None
        members: list[int] = []
        for other in stages:
            first = world.firsts[other]
            if self._alike(name, stages):
                members.append(first + world.rank - world.firsts[stage])
            else:
                members.extend(range(first, first + self.execution.chunks[other].mesh.devices))
        # The name of a group is made of its ranks in order, and must be the same on all of them.
        members.sort()
        group: dist.ProcessGroup = group_of(members)
        return AxisGroup(str(group.group_name), len(members), members.index(world.rank))

    def _summed(
        self, name: str, stages: tuple[int, ...], gradient: Tensor, layout: Layout
    ) -> Tensor:
        group = self._group(name, stages)
        groups = self.world.groups
        assert groups is not None and self.world.stage is not None
        if self._alike(name, stages):
            return all_reduce(gradient, group)
        whole = gather_full(gradient, layout, groups)
        # All ranks of a stage have the same whole gradient: one of them adds it.
        first = self.world.rank == self.world.firsts[self.world.stage]
        total = all_reduce(whole if first else torch.zeros_like(whole), group)
        return shard_of(total, cuts_of(layout, groups.mesh.shape, groups.coordinate)).contiguous()
