"""The world of a plan: its ranks, the meshes of its stages on them, and the ranks that it leaves idle."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from autopar.errors import PlanError
from autopar.order.execution import Execution

from .collectives import DeviceGroups
from .groups import group_of


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The world of a plan.

    `groups`: of this rank's stage; None if the rank is idle. `stage`: its number. `firsts`: the first rank of every
    stage. `size`: the number of all running ranks, idle ones included. `messages`: the group in which stages send.
    """

    groups: DeviceGroups | None
    stage: int | None
    firsts: tuple[int, ...]
    rank: int
    size: int
    messages: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, execution: Execution) -> World:
        """The world of a plan; every rank calls this at the same point."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size < execution.devices:
            raise PlanError(f"the plan is for {execution.devices} devices, but {size} ranks are running")
        firsts, at, own = [], 0, None
        for number, chunk in enumerate(execution.chunks[: execution.stages]):
            firsts.append(at)
            if at <= rank < at + chunk.mesh.devices:
                own = number
            at += chunk.mesh.devices
        groups = DeviceGroups.of_ranks(execution.chunks[own].mesh, firsts[own]) if own is not None else None
        messages = group_of(range(at), messages=True) if own is not None and len(firsts) > 1 else None
        return cls(groups=groups, stage=own, firsts=tuple(firsts), rank=rank, size=size, messages=messages)

    @classmethod
    def around(cls, groups: DeviceGroups) -> World:
        """The world of one stage on groups that exist."""
        return cls(groups=groups, stage=0, firsts=(groups.first,), rank=groups.rank, size=groups.mesh.devices)

    @property
    def staged(self) -> bool:
        """Whether some ranks do not hold every parameter: there are several stages, or idle ranks."""
        return len(self.firsts) > 1 or self.groups is None or self.size > self.groups.mesh.devices
