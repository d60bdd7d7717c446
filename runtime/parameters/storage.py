"""Parameters of a planned module: this rank's shards as DTensors, in the plan's storage layouts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.order.execution import Execution
from autopar.runtime.files.piece_tensors import in_pieces
from autopar.runtime.files.weight_files import FileTensor
from autopar.runtime.ranks.collectives import in_movable_type
from autopar.runtime.ranks.cuts import cuts_of, shard_of
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.ranks.world import World
from autopar.runtime.redistribution.steps import gather_full
from autopar.sharding.layout import Kind, Layout, R, local_shape
from autopar.sharding.mesh import Mesh

from .dtensor_draws import draw_whole_values
from .dtensor_numbers import refuse_numbers_of_parts
from .torch_layouts import device_mesh, mesh_without_groups, placements_of

refuse_numbers_of_parts()
draw_whole_values()


def local_of(value: Tensor) -> Tensor:
    """The shard of a DTensor, without autograd; other tensors are returned detached."""
    return value._local_tensor if isinstance(value, DTensor) else value.detach()


class Storage:
    """The storage of one chunk's parameters on their mesh, seen from this rank.

    `layouts`: of the parameters, by name, as the plan stores them. `groups`: None if the rank is
    outside the mesh, whose ranks begin at `first`. `plain`: all of a stage's parameters are stored
    whole on every rank, as plain tensors, which optimizers handle fastest.
    """

    def __init__(
        self,
        mesh: Mesh,
        layouts: Mapping[str, Layout],
        groups: DeviceGroups | None,
        first: int,
        device: torch.device,
        *,
        plain: bool,
    ) -> None:
        self.mesh = mesh
        self.layouts = layouts
        self.groups = groups
        self.device = device
        # In torch's words; None where parameters are plain tensors.
        self.torch_mesh: DeviceMesh | None = None
        if not plain and groups is not None:
            self.torch_mesh = device_mesh(groups, device)
        elif not plain:
            self.torch_mesh = mesh_without_groups(mesh, first, device)

    def placed(self, name: str, whole: Tensor | FileTensor) -> Tensor:
        """This rank's shard of a parameter, copied or read out of its whole value.

        It is empty where the rank is none of the mesh.
        """
        size = torch.Size(whole.shape)
        if self.groups is None:
            nothing = torch.empty(0, dtype=whole.dtype, device=self.device)
            return self.described(name, nothing, size)
        layout = self.layouts[name]
        shape = self.mesh.shape
        cuts = cuts_of(layout, shape, self.groups.coordinate)
        if isinstance(whole, FileTensor):
            shard = whole.shard(cuts).to(self.device)
        else:
            # A copy in any case: the caller's whole value must be free to go.
            shard = shard_of(whole, cuts).to(self.device, copy=True)
            shard = shard.contiguous(memory_format=torch.contiguous_format)
        assert tuple(shard.shape) == local_shape(layout, tuple(size), shape)
        return self.described(name, shard, size)

    def described(self, name: str, shard: Tensor, shape: torch.Size) -> Tensor:
        """A shard of a parameter (or of its gradient) as a part of the whole, of this shape."""
        return self._described(shard, self.layouts[name], shape)

    def replicated(self, value: Tensor) -> Tensor:
        """A value that all ranks of the mesh have, as a DTensor on it."""
        return self._described(value, (R,) * len(self.mesh.axes), value.shape)

    def _described(self, shard: Tensor, layout: Layout, shape: torch.Size) -> Tensor:
        if self.torch_mesh is None:
            return shard
        # The stride of the whole, contiguous; torch would derive it from this shard's.
        stride = torch.empty(shape, device="meta").stride()
        placements = placements_of(layout, self.mesh.shape) or (Replicate(),)
        return in_pieces(
            DTensor.from_local(
                # The check would communicate, and not every rank describes this shard.
                shard,
                self.torch_mesh,
                placements,
                run_check=False,
                shape=shape,
                stride=stride,
            )
        )


class Storages:
    """The storages of all chunks of a plan, seen from this rank: who holds which parameter."""

    def __init__(self, execution: Execution, world: World, device: torch.device) -> None:
        self.execution = execution
        self.world = world
        self.device = device
        self.chunks = tuple(self._of_chunk(number) for number in range(len(execution.chunks)))
        # The chunks of this rank; none if it is idle, several in an interleaved pipeline.
        self.own: tuple[int, ...] = ()
        if world.stage is not None:
            self.own = tuple(range(world.stage, len(self.chunks), execution.stages))

    def _of_chunk(self, number: int) -> Storage:
        chunks = self.execution.chunks
        stage = number % self.execution.stages
        # All parameters of a stage are plain tensors, or none: an optimizer updates them together,
        # and torch's fast paths take no mixture.
        plain = not any(
            not placement.is_replicate()
            for chunk in chunks[stage :: self.execution.stages]
            for layout in chunk.stored.values()
            for placement in placements_of(layout, chunk.mesh.shape)
        )
        return Storage(
            chunks[number].mesh,
            chunks[number].stored,
            self.world.groups if stage == self.world.stage else None,
            self.world.firsts[stage],
            self.device,
            plain=plain,
        )

    def holders(self, name: str) -> list[int]:
        """The chunks that hold a parameter; a tied one may be in several."""
        return [number for number, chunk in enumerate(self.chunks) if name in chunk.layouts]

    def of(self, name: str) -> Storage:
        """The storage of a parameter.

        It is that of this rank's own chunk if one holds it, else of the first chunk that does.
        """
        holders = self.holders(name)
        own = next((number for number in holders if number in self.own), holders[0])
        return self.chunks[own]

    def holds(self, name: str) -> bool:
        """Whether this rank has a part of a parameter."""
        return not self.world.staged or any(name in self.chunks[n].layouts for n in self.own)

    @cached_property
    def counted(self) -> frozenset[str]:
        """The parameters whose shard on this rank is one that no other rank counts."""
        if self.world.groups is None:
            return frozenset()
        coordinate = self.world.groups.coordinate
        # Several stages may hold a tied parameter: the first of them counts it. Along an axis that
        # does not split a parameter all ranks have equal copies: rank 0 counts.
        return frozenset(
            name
            for number in self.own
            for name, layout in self.chunks[number].layouts.items()
            if self.holders(name)[0] == number
            and all(
                placement.kind is Kind.SPLIT or position == 0
                for position, placement in zip(coordinate, layout, strict=True)
            )
        )

    def dtype_of(self, name: str) -> torch.dtype:
        """The type in which a parameter is stored, and its gradient returned."""
        types = self.execution.schedule.types
        dtype: torch.dtype = getattr(torch, types.stored(self.execution.graph.tensors[name]))
        return dtype

    def replicated(self, value: Tensor) -> Tensor:
        """A value that all ranks of the stage have, as a DTensor on its mesh."""
        return self.chunks[self.own[0]].replicated(value)

    def described(self, name: str, shard: Tensor) -> Tensor:
        """A gradient of this rank's shard as the parameter lies."""
        shape = torch.Size(self.execution.graph.tensors[name].shape)
        return self.of(name).described(name, shard, shape)

    def whole(self, name: str, shard: Tensor | None) -> Tensor:
        """The whole tensor on every rank from this rank's shard (None: it has none).

        Collective: every rank calls it.
        """
        groups = self.world.groups
        if not self.world.staged:
            assert shard is not None and groups is not None
            return gather_full(shard, self.of(name).layouts[name], groups)
        holder = self.holders(name)[0]
        stage = holder % self.execution.stages
        if stage == self.world.stage:
            assert shard is not None and groups is not None
            layout = self.chunks[holder].layouts[name]
            whole = gather_full(shard, layout, groups).contiguous()
        else:
            shape = self.execution.graph.tensors[name].shape
            whole = torch.empty(shape, dtype=self.dtype_of(name), device=self.device)
        # The ranks of the holding stage have it now; the first of them tells all others.
        dist.broadcast(in_movable_type(whole), src=self.world.firsts[stage])
        return whole
