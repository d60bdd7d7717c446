"""The places of parameters on the ranks: who holds which, in which layout and type."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir import Graph
from autopar.order.execution import Execution
from autopar.runtime.parameters.storage import Storage
from autopar.runtime.ranks.collectives import in_movable_type
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.ranks.world import World
from autopar.runtime.redistribution.steps import gather_full
from autopar.sharding.layout import Kind, Layout, R

from .stage import Stage


class ParameterPlaces:
    """The part of the engine that knows where parameters are."""

    execution: Execution
    world: World
    device: torch.device
    graph: Graph
    stages: Mapping[int, Stage]

    @property
    def groups(self) -> DeviceGroups:
        """This rank's mesh."""
        assert self.world.groups is not None
        return self.world.groups

    @cached_property
    def _storages(self) -> tuple[Storage, ...]:
        """The storage of each chunk's parameters, seen from this rank."""
        stages = self.execution.stages
        storages = []
        for number, chunk in enumerate(self.execution.chunks):
            stage = number % stages
            # All parameters of a stage are plain tensors, or none: an optimizer updates them
            # together, and torch's fast paths take no mixture.
            layouts = [
                layout
                for other in range(stage, len(self.execution.chunks), stages)
                for layout in self.layouts(other).values()
            ]
            plain = not any(is_split(layout) for layout in layouts)
            groups = self.world.groups if stage == self.world.stage else None
            first = self.world.firsts[stage]
            storages.append(Storage(chunk.mesh, groups, first, self.device, plain=plain))
        return tuple(storages)

    def layouts(self, number: int) -> Mapping[str, Layout]:
        """The layouts in which a chunk's parameters are stored."""
        return self.execution.chunks[number].whole.program.assignment.storage

    def holders(self, name: str) -> list[int]:
        """The chunks that hold a parameter; a tied one may be in several."""
        chunks = range(len(self.execution.chunks))
        return [number for number in chunks if name in self.layouts(number)]

    def storage_of(self, name: str) -> tuple[Storage, Layout]:
        """A parameter's storage and layout.

        They are those of this rank's own chunk if one holds it, else of the first chunk that does.
        """
        holders = self.holders(name)
        own = next((number for number in holders if number in self.stages), holders[0])
        return self._storages[own], self.layouts(own)[name]

    def holds(self, name: str) -> bool:
        """Whether this rank has a part of a parameter."""
        return not self.world.staged or any(name in self.layouts(n) for n in self.stages)

    def master(self, name: str) -> torch.dtype:
        """The type in which a parameter is stored, and its gradient returned."""
        types = self.execution.schedule.types
        dtype: torch.dtype = getattr(torch, types.stored(self.graph.tensors[name]))
        return dtype

    def replicated(self, value: Tensor) -> Tensor:
        """A value that all ranks of the stage have, as a DTensor on its mesh."""
        storage = self._storages[next(iter(self.stages))]
        return storage.described_as(value, (R,) * len(storage.mesh.axes), value.shape)

    def described(self, name: str, shard: Tensor) -> Tensor:
        """A gradient of this rank's shard as the parameter lies."""
        storage, layout = self.storage_of(name)
        return storage.described_as(shard, layout, torch.Size(self.graph.tensors[name].shape))

    def whole_parameter(self, name: str, shard: Tensor | None) -> Tensor:
        """The whole tensor on every rank from this rank's shard (None: it has none).

        Collective: every rank calls it.
        """
        if not self.world.staged:
            assert shard is not None
            return gather_full(shard, self.storage_of(name)[1], self.groups)
        holder = self.holders(name)[0]
        stage = holder % self.execution.stages
        if stage == self.world.stage:
            assert shard is not None
            layout = self.layouts(holder)[name]
            whole = gather_full(shard, layout, self.groups).contiguous()
        else:
            shape = self.graph.tensors[name].shape
            whole = torch.empty(shape, dtype=self.master(name), device=self.device)
        # The ranks of the holding stage have it now; the first of them tells all others.
        dist.broadcast(in_movable_type(whole), src=self.world.firsts[stage])
        return whole


def is_split(layout: Layout) -> bool:
    """Whether some axis splits a tensor that is stored in this layout."""
    return any(placement.kind is Kind.SPLIT for placement in layout)
