"""Parameters of a planned module: this rank's shards as DTensors, in the places of the original module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.errors import PlanError
from autopar.sharding.candidates import is_storable
from autopar.sharding.layout import REDUCTIONS, Kind, Layout, R, S, format_layout, local_parts, local_shape
from autopar.sharding.layout import Placement as OurPlacement
from autopar.sharding.mesh import Mesh

from .collectives import DeviceGroups, cuts_of, shard_of
from .groups import group_of
from .original_modules import is_free
from .piece_tensors import in_pieces
from .weight_files import FileTensor


def local_of(value: Tensor) -> Tensor:
    """The shard of a DTensor, without autograd; other tensors are returned detached."""
    return value._local_tensor if isinstance(value, DTensor) else value.detach()


def device_mesh(groups: DeviceGroups, device: torch.device | str) -> DeviceMesh:
    """The mesh as torch's `DeviceMesh`, on existing process groups; on an axis of size 1 this rank is its own group.

    Nothing here is made by all ranks together: ranks of another stage have another mesh, and would not come.
    """
    found = mesh_without_groups(groups.mesh, groups.first, device)
    if groups.mesh.devices == 1:
        return found
    existing = [group if group is not None else group_of([groups.rank]) for group in groups.process_groups]
    names, kind = tuple(axis.name for axis in groups.mesh.axes), torch.device(device).type
    if len(existing) == 1:
        return DeviceMesh.from_group(existing[0], kind, mesh_dim_names=names)
    return DeviceMesh.from_group(existing, kind, mesh=found.mesh, mesh_dim_names=names)


def mesh_without_groups(mesh: Mesh, first: int, device: torch.device | str) -> DeviceMesh:
    """The mesh of ranks of which this one may be none: a description that communicates nothing."""
    shape, names = (mesh.shape, tuple(axis.name for axis in mesh.axes)) if mesh.axes else ((1,), ("device",))
    ranks = first + torch.arange(mesh.devices).reshape(shape)
    return DeviceMesh(torch.device(device).type, ranks, mesh_dim_names=names, _init_backend=False)


def placements_of(layout: Layout, mesh: tuple[int, ...]) -> tuple[Placement, ...]:
    """A layout in torch's words: a split within parts is a `_StridedShard` with the local number of parts.

    >>> from autopar.sharding.layout import parse_layout
    >>> placements_of(parse_layout("S0 R S1/3"), (2, 2, 2))
    (Shard(dim=0), Replicate(), _StridedShard(dim=1, sf=3))
    """
    if not is_storable(layout, mesh):
        raise PlanError(f"no DTensor lies as [{format_layout(layout)}]: torch cannot split a dim within parts on two axes")
    done = [R] * len(layout)
    found: list[Placement] = []
    for axis, placement in enumerate(layout):
        done[axis] = placement
        if placement.kind is not Kind.SPLIT:
            found.append(Partial(placement.reduction) if placement.kind is Kind.PARTIAL else Replicate())
            continue
        parts = local_parts(tuple(done), axis, mesh)
        found.append(Shard(placement.dim) if parts == 1 else _StridedShard(placement.dim, split_factor=parts))
    return tuple(found)


def layout_of(placements: Sequence[Placement]) -> Layout:
    """Torch's placements as a layout; the gradient of a whole value is whole.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> format_layout(layout_of((Shard(0), Replicate())))
    'S0 R'
    """
    found: list[OurPlacement] = []
    for placement in placements:
        if isinstance(placement, _StridedShard):
            found.append(S(placement.dim, placement.split_factor))
        elif isinstance(placement, Shard):
            found.append(S(placement.dim))
        elif isinstance(placement, Partial) and placement.reduce_op in REDUCTIONS:
            found.append(OurPlacement(Kind.PARTIAL, reduction=placement.reduce_op))
        elif isinstance(placement, Replicate):
            found.append(R)
        else:
            valid = "Shard, Replicate and Partial of sum, max or min"
            raise PlanError(f"the placement {placement} has no counterpart: redistribute() it to one of {valid}")
    return tuple(found)


class Storage:
    """The storage of one chunk's parameters on their mesh, seen from this rank; `groups` is None if it is outside.

    `plain`: all of a model's parameters are stored whole on every rank, as plain tensors, which optimizers handle
    fastest.
    """

    def __init__(self, mesh: Mesh, groups: DeviceGroups | None, first: int, device: torch.device, *, plain: bool) -> None:
        self.mesh, self.groups, self.plain, self.device = mesh, groups, plain, device
        self.described: DeviceMesh | None = None
        if not plain:
            self.described = device_mesh(groups, device) if groups is not None else mesh_without_groups(mesh, first, device)

    def placed(self, whole: Tensor | FileTensor, layout: Layout) -> Tensor:
        """This rank's shard, copied or read out of a whole value; empty where the rank is none of the mesh."""
        size = torch.Size(whole.shape)
        if self.groups is None:
            return self.described_as(torch.empty(0, dtype=whole.dtype, device=self.device), layout, size)
        shape = self.mesh.shape
        cuts = cuts_of(layout, shape, self.groups.coordinate)
        if isinstance(whole, FileTensor):
            shard = whole.shard(cuts).to(self.device)
        else:
            shard = shard_of(whole, cuts).to(self.device, copy=True).contiguous(memory_format=torch.contiguous_format)
        assert tuple(shard.shape) == local_shape(layout, tuple(size), shape)
        return self.described_as(shard, layout, size)

    def described_as(self, shard: Tensor, layout: Layout, shape: torch.Size) -> Tensor:
        """A shard as the DTensor that it is part of."""
        if self.described is None:
            return shard
        stride = torch.empty(shape, device="meta").stride()
        placements = placements_of(layout, self.mesh.shape) or (Replicate(),)
        return in_pieces(DTensor.from_local(shard, self.described, placements, run_check=False, shape=shape, stride=stride))


def attach(root: nn.Module, path: str, value: Tensor) -> tuple[nn.Module, str]:
    """Register a parameter or a buffer under its module path, or with underscores for dots if the path is taken."""
    *parents, leaf = path.split(".")
    module = root
    for part in parents:
        child = module._modules.get(part)
        if child is None:
            if not is_free(module, part):
                return attach(root, path.replace(".", "_"), value)
            child = nn.Module()
            module.add_module(part, child)
        module = child
    if not is_free(module, leaf):
        return attach(root, (path.replace(".", "_") if parents else path) + "_", value)
    if isinstance(value, nn.Parameter):
        module.register_parameter(leaf, value)
    else:
        module.register_buffer(leaf, value)
    return module, leaf
