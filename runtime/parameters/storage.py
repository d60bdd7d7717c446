"""Parameters of a planned module: this rank's shards as DTensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.errors import PlanError
from autopar.runtime.files.piece_tensors import in_pieces
from autopar.runtime.files.weight_files import FileTensor
from autopar.runtime.ranks.cuts import cuts_of, shard_of
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.ranks.process_groups import group_of
from autopar.sharding.candidates import is_storable
from autopar.sharding.layout import (
    REDUCTIONS,
    Kind,
    Layout,
    R,
    S,
    format_layout,
    local_parts,
    local_shape,
)
from autopar.sharding.layout import Placement as OurPlacement
from autopar.sharding.mesh import Mesh


def local_of(value: Tensor) -> Tensor:
    """The shard of a DTensor, without autograd; other tensors are returned detached."""
    return value._local_tensor if isinstance(value, DTensor) else value.detach()


def device_mesh(groups: DeviceGroups, device: torch.device | str) -> DeviceMesh:
    """The mesh as torch's `DeviceMesh`, on existing process groups.

    Nothing here is made by all ranks together: ranks of another stage have another mesh, and would
    not come.
    """
    described = mesh_without_groups(groups.mesh, groups.first, device)
    if groups.mesh.devices == 1:
        return described
    # On an axis of size 1 this rank is its own group: torch wants one for every axis.
    existing = [
        group if group is not None else group_of([groups.rank]) for group in groups.process_groups
    ]
    names = tuple(axis.name for axis in groups.mesh.axes)
    kind = torch.device(device).type
    if len(existing) == 1:
        return DeviceMesh.from_group(existing[0], kind, mesh_dim_names=names)
    return DeviceMesh.from_group(existing, kind, mesh=described.mesh, mesh_dim_names=names)


def mesh_without_groups(mesh: Mesh, first: int, device: torch.device | str) -> DeviceMesh:
    """The mesh of ranks of which this one may be none: a description that communicates nothing."""
    shape: tuple[int, ...] = (1,)
    names: tuple[str, ...] = ("device",)
    # A mesh of one device has no axes, which torch does not allow.
    if mesh.axes:
        shape = mesh.shape
        names = tuple(axis.name for axis in mesh.axes)
    ranks = first + torch.arange(mesh.devices).reshape(shape)
    return DeviceMesh(torch.device(device).type, ranks, mesh_dim_names=names, _init_backend=False)


def placements_of(layout: Layout, mesh: tuple[int, ...]) -> tuple[Placement, ...]:
    """A layout in torch's words.

    A split within parts is a `_StridedShard` with the local number of parts.

    >>> from autopar.sharding.layout import parse_layout
    >>> placements_of(parse_layout("S0 R S1/3"), (2, 2, 2))
    (Shard(dim=0), Replicate(), _StridedShard(dim=1, sf=3))
    """
    if not is_storable(layout, mesh):
        raise PlanError(
            f"no DTensor lies as [{format_layout(layout)}]: torch cannot split a dim within parts "
            "on two axes"
        )
    so_far = [R] * len(layout)
    torchs: list[Placement] = []
    for axis, placement in enumerate(layout):
        so_far[axis] = placement
        if placement.kind is Kind.PARTIAL:
            torchs.append(Partial(placement.reduction))
        elif placement.kind is not Kind.SPLIT:
            torchs.append(Replicate())
        else:
            parts = local_parts(tuple(so_far), axis, mesh)
            dim = placement.dim
            torchs.append(Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts))
    return tuple(torchs)


def layout_of(placements: Sequence[Placement]) -> Layout:
    """Torch's placements as a layout; the gradient of a whole value is whole.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> format_layout(layout_of((Shard(0), Replicate())))
    'S0 R'
    """
    ours: list[OurPlacement] = []
    for placement in placements:
        # A `_StridedShard` is a `Shard`, too.
        if isinstance(placement, _StridedShard):
            ours.append(S(placement.dim, placement.split_factor))
        elif isinstance(placement, Shard):
            ours.append(S(placement.dim))
        elif isinstance(placement, Partial) and placement.reduce_op in REDUCTIONS:
            ours.append(OurPlacement(Kind.PARTIAL, reduction=placement.reduce_op))
        elif isinstance(placement, Replicate):
            ours.append(R)
        else:
            valid = "Shard, Replicate and Partial of sum, max or min"
            raise PlanError(
                f"the placement {placement} has no counterpart: redistribute() it to one of {valid}"
            )
    return tuple(ours)


class Storage:
    """The storage of one chunk's parameters on their mesh, seen from this rank.

    `groups`: None if the rank is outside the mesh. `plain`: all of a model's parameters are stored
    whole on every rank, as plain tensors, which optimizers handle fastest.
    """

    def __init__(
        self,
        mesh: Mesh,
        groups: DeviceGroups | None,
        first: int,
        device: torch.device,
        *,
        plain: bool,
    ) -> None:
        self.mesh = mesh
        self.groups = groups
        self.plain = plain
        self.device = device
        self.described: DeviceMesh | None = None
        if not plain and groups is not None:
            self.described = device_mesh(groups, device)
        elif not plain:
            self.described = mesh_without_groups(mesh, first, device)

    def placed(self, whole: Tensor | FileTensor, layout: Layout) -> Tensor:
        """This rank's shard, copied or read out of a whole value.

        It is empty where the rank is none of the mesh.
        """
        size = torch.Size(whole.shape)
        if self.groups is None:
            nothing = torch.empty(0, dtype=whole.dtype, device=self.device)
            return self.described_as(nothing, layout, size)
        shape = self.mesh.shape
        cuts = cuts_of(layout, shape, self.groups.coordinate)
        if isinstance(whole, FileTensor):
            shard = whole.shard(cuts).to(self.device)
        else:
            # A copy in any case: the caller's whole value must be free to go.
            shard = shard_of(whole, cuts).to(self.device, copy=True)
            shard = shard.contiguous(memory_format=torch.contiguous_format)
        assert tuple(shard.shape) == local_shape(layout, tuple(size), shape)
        return self.described_as(shard, layout, size)

    def described_as(self, shard: Tensor, layout: Layout, shape: torch.Size) -> Tensor:
        """A shard as the DTensor that it is part of."""
        if self.described is None:
            return shard
        # The stride of the whole, contiguous; torch would derive it from this shard's.
        stride = torch.empty(shape, device="meta").stride()
        placements = placements_of(layout, self.mesh.shape) or (Replicate(),)
        return in_pieces(
            DTensor.from_local(
                # The check would communicate, and not every rank describes this shard.
                shard,
                self.described,
                placements,
                run_check=False,
                shape=shape,
                stride=stride,
            )
        )
