"""The world of a plan: its ranks, the meshes of its stages, and the ranks that it leaves idle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from autopar.errors import PlanError
from autopar.order.execution import Execution
from autopar.order.messages import message_pairs

from .device_groups import DeviceGroups
from .process_groups import message_group


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The world of a plan.

    `groups`: of this rank's stage; None if the rank is idle. `stage`: its number. `firsts`: the
    first rank of every stage. `size`: the number of all running ranks, idle ones included.
    `messages`: the groups of this rank's messages, by sender and receiver.
    """

    groups: DeviceGroups | None
    stage: int | None
    firsts: tuple[int, ...]
    rank: int
    size: int
    messages: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def of(cls, execution: Execution) -> World:
        """The world of a plan; every rank calls this at the same point."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size < execution.devices:
            raise PlanError(
                f"the plan is for {execution.devices} devices, but {size} ranks are running"
            )
        firsts = []
        devices = 0
        stage = None
        # The first chunks are those of the stages in turn; later ones go around once more.
        for number, chunk in enumerate(execution.chunks[: execution.stages]):
            firsts.append(devices)
            if devices <= rank < devices + chunk.mesh.devices:
                stage = number
            devices += chunk.mesh.devices
        groups = None
        messages = {}
        if stage is not None:
            groups = DeviceGroups.of_ranks(execution.chunks[stage].mesh, firsts[stage])
            # All ranks go through all pairs in one order: two of them meet to make a group.
            messages = {
                pair: message_group(*pair) for pair in message_pairs(execution) if rank in pair
            }
        return cls(
            groups=groups,
            stage=stage,
            firsts=tuple(firsts),
            rank=rank,
            size=size,
            messages=messages,
        )

    @classmethod
    def around(cls, groups: DeviceGroups) -> World:
        """The world of one stage on groups that exist."""
        return cls(
            groups=groups,
            stage=0,
            firsts=(groups.first,),
            rank=groups.rank,
            size=groups.mesh.devices,
        )

    @property
    def staged(self) -> bool:
        """Whether some ranks do not hold every parameter: of other stages, or idle ones."""
        return len(self.firsts) > 1 or self.groups is None or self.size > self.groups.mesh.devices
