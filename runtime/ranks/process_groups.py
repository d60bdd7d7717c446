"""Process groups: each is made once per process, by its members alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

Key = tuple[tuple[int, ...], bool]
_HOSTS: Key = ((), True)


@dataclass(slots=True)
class _Groups:
    """The process groups made so far, inside the present process group of all ranks."""

    world: Any = None
    made: dict[Key, dist.ProcessGroup] = field(default_factory=dict)


_GROUPS = _Groups()


def group_of(ranks: Sequence[int], *, messages: bool = False) -> dist.ProcessGroup:
    """The group of these ranks, which include this one.

    `messages`: a separate group for messages between two ranks. Collectives of a group are counted,
    and ranks send unequal numbers of messages.
    """
    made = _made()
    key = tuple(ranks), messages
    if key not in made:
        world = dist.group.WORLD if key == (tuple(range(dist.get_world_size())), False) else None
        made[key] = world if world is not None else _new_group(key)
    return made[key]


def host_group(device: torch.device | str) -> dist.ProcessGroup | None:
    """The group for messages of the hosts of all ranks, which compute on `device`.

    Its messages wait for no device. None: the group of all ranks, whose tensors are on the host.
    Collective, the first time.
    """
    if torch.device(device).type == "cpu":
        return None
    made = _made()
    if _HOSTS not in made:
        made[_HOSTS] = dist.new_group(backend="gloo", timeout=late())
    return made[_HOSTS]


def _made() -> dict[Key, dist.ProcessGroup]:
    """The groups made in the present process group of all ranks."""
    # A program may end its process group and start another: groups of the old one are of no use.
    if _GROUPS.world is not dist.group.WORLD:
        _GROUPS.world = dist.group.WORLD
        _GROUPS.made = {}
    return _GROUPS.made


def late() -> timedelta | None:
    """The time that a rank may be late to collectives of all ranks; None: torch's default.

    New groups are to wait as long. Torch would give them half an hour with Gloo.
    """
    world = dist.group.WORLD
    assert world is not None
    backend = world._get_backend(world._device_types[0])
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends.
    options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)
    limit: timedelta | None = getattr(options, "_timeout", None)
    return limit


def _new_group(key: Key) -> dist.ProcessGroup:
    """A group with a name made of its ranks.

    Torch numbers the groups that members make alone by the groups of the process. Members may have
    made unequal numbers of groups, and would then wait for one another under different names for
    ever.
    """
    ranks, messages = key
    purpose = "messages" if messages else "collectives"
    text = f"autopar {purpose} {ranks}"

    def name(ranks: list[int]) -> str:
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    # torch has no argument for the name, which is replaced for the time of the call.
    torchs_name = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = name
    try:
        # Members alone synchronise: ranks of other stages make other groups and would not come.
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=late(), use_local_synchronization=True
        )
    finally:
        distributed_c10d._hash_ranks_to_str = torchs_name
    return group
