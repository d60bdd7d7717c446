"""A mesh with the process groups of its axes, seen from this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from autopar.errors import PlanError
from autopar.sharding.mesh import Axes, Mesh, axis_sets

from .process_groups import group_of, parameter_group


class AxisGroup(NamedTuple):
    """This rank's process group over one mesh axis or several.

    It holds plain values, so that a compiled graph can hold it.
    """

    name: str
    size: int
    coordinate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroups:
    """A mesh with this rank's place and the process groups of its axes.

    `first`: the mesh's devices are the ranks from this one on. `joint`: the groups over several
    axes; a rank's coordinate there is its place in row-major order.
    """

    mesh: Mesh
    rank: int
    coordinate: tuple[int, ...]
    axes: tuple[AxisGroup, ...]
    process_groups: tuple[dist.ProcessGroup | None, ...]
    first: int = 0
    joint: Mapping[Axes, AxisGroup] = field(default_factory=dict)

    def over(self, axes: Axes) -> AxisGroup:
        """The group over one axis or several."""
        return self.axes[axes[0]] if len(axes) == 1 else self.joint[axes]

    def of_parameters(self, axes: Axes) -> AxisGroup:
        """The group over these axes that has parameters alone.

        Collective, the first time: its ranks must make their groups in one order.
        """
        over = self.over(axes)
        if over.size == 1:
            return over
        members = next(group for group in self.mesh.groups(axes) if self.rank - self.first in group)
        own = parameter_group([self.first + member for member in members])
        return over._replace(name=str(own.group_name))

    @classmethod
    def create(cls, mesh: Mesh) -> DeviceGroups:
        """The mesh of all ranks. A mesh of one device needs no process group."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != mesh.devices:
            raise PlanError(
                f"the plan is for {mesh.devices} devices ({mesh}), but {world} ranks are running"
            )
        return cls.of_ranks(mesh, 0)

    @classmethod
    def of_ranks(cls, mesh: Mesh, first: int) -> DeviceGroups:
        """The mesh of the ranks from `first` on, which include this one.

        Collective: each of these ranks must call it at the same point.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        process_groups: dict[Axes, dist.ProcessGroup | None] = {}
        axis_groups: dict[Axes, AxisGroup] = {}
        # Members of a group meet when it is made, so all ranks go through the axes in one order.
        for axes in axis_sets(mesh.shape):
            members = next(group for group in mesh.groups(axes) if rank - first in group)
            own = None
            if len(members) > 1:
                own = group_of([first + member for member in members])
            process_groups[axes] = own
            axis_groups[axes] = AxisGroup(
                name=str(own.group_name) if own is not None else "",
                size=len(members),
                coordinate=members.index(rank - first),
            )
        single = [axes for axes in axis_groups if len(axes) == 1]
        return cls(
            mesh=mesh,
            rank=rank,
            coordinate=mesh.coordinate(rank - first),
            axes=tuple(axis_groups[axes] for axes in single),
            process_groups=tuple(process_groups[axes] for axes in single),
            first=first,
            joint={axes: group for axes, group in axis_groups.items() if len(axes) > 1},
        )

    @classmethod
    def single(cls) -> DeviceGroups:
        """One device, whether or not a process group runs."""
        return cls(mesh=Mesh(axes=()), rank=0, coordinate=(), axes=(), process_groups=())
