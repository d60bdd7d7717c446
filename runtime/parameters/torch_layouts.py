"""Meshes and layouts in torch's words: `DeviceMesh` and the placements of DTensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.errors import PlanError
from autopar.order.execution import Execution
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.ranks.process_groups import group_of
from autopar.runtime.torch_versions import require_parts
from autopar.sharding.candidates import is_storable
from autopar.sharding.layout import REDUCTIONS, Kind, Layout, R, S, format_layout, local_parts
from autopar.sharding.layout import Placement as OurPlacement
from autopar.sharding.mesh import Mesh


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


def require_placements(execution: Execution) -> None:
    """Refuse a plan with a parameter that torch, in this version, cannot hold as a DTensor."""
    for chunk in execution.chunks:
        for layout in chunk.stored.values():
            placements_of(layout, chunk.mesh.shape)


def placements_of(layout: Layout, mesh: tuple[int, ...]) -> tuple[Placement, ...]:
    """A layout in torch's words.

    A split within parts is a `_StridedShard` with the local number of parts. An axis of size 1
    splits nothing: torch would ask it for a group, which a mesh of one device lacks.

    >>> from autopar.sharding.layout import parse_layout
    >>> placements_of(parse_layout("S0 R S1/3"), (2, 2, 2))
    (Shard(dim=0), Replicate(), _StridedShard(dim=1, sf=3))
    >>> placements_of(parse_layout("S0 S1"), (2, 1))
    (Shard(dim=0), Replicate())
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
        if placement.kind not in (Kind.SPLIT, Kind.PARTIAL) or mesh[axis] == 1:
            torchs.append(Replicate())
        elif placement.kind is Kind.PARTIAL:
            torchs.append(Partial(placement.reduction))
        else:
            parts = local_parts(tuple(so_far), axis, mesh)
            if parts > 1:
                require_parts(format_layout(layout))
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
