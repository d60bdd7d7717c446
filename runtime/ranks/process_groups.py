"""Process groups: each is made once per process, by its members alone.

NCCL makes a group from another by a split, a collective of all ranks of the world. A plan's groups
are not made so: ranks of other stages make other groups, idle ranks none, and a program may make
one at any time. Members that make several groups make them in one order, since they wait for each
other in each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

Key = tuple[str, tuple[int, ...]]
_HOSTS: Key = ("hosts", ())


@dataclass(slots=True)
class _Groups:
    """The process groups made so far, inside the present process group of all ranks."""

    world: Any = None
    made: dict[Key, dist.ProcessGroup] = field(default_factory=dict)


_GROUPS = _Groups()


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of these ranks, which include this one, for collectives."""
    if len(ranks) == dist.get_world_size() and list(ranks) == sorted(ranks):
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return _made(("collectives", tuple(ranks)))


def parameter_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of these ranks, which include this one, for collectives of parameters.

    A group is one queue: there parameters that are gathered ahead wait for no values.
    """
    return _made(("parameters", tuple(ranks)))


def message_group(source: int, target: int) -> dist.ProcessGroup:
    """The group for messages from one rank to another, of which this rank is one.

    Each direction has a group of its own. On NCCL a group is one queue, and a send waits for its
    receive there: in a queue for both directions, two ranks that send to each other would wait for
    ever.
    """
    return _made(("messages", (source, target)))


def host_group(device: torch.device | str) -> dist.ProcessGroup | None:
    """The group for messages of the hosts of all ranks, which compute on `device`.

    Its messages wait for no device. None: the group of all ranks, whose tensors are on the host.
    Collective, the first time.
    """
    return None if torch.device(device).type == "cpu" else _made(_HOSTS)


def _made(key: Key) -> dist.ProcessGroup:
    """The group of a key, made if it does not exist."""
    # A program may end its process group and start another: groups of the old one are of no use.
    if _GROUPS.world is not dist.group.WORLD:
        _GROUPS.world = dist.group.WORLD
        _GROUPS.made = {}
    if key not in _GROUPS.made:
        _GROUPS.made[key] = (
            dist.new_group(backend="gloo", timeout=late()) if key == _HOSTS else _new_group(key)
        )
    return _GROUPS.made[key]


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
    """A group with a name made of its ranks, connected by its members alone.

    Torch numbers the groups that members make alone by the groups of the process. Members may have
    made unequal numbers of groups, and would then wait for one another under different names for
    ever.
    """
    purpose, ranks = key
    text = f"autopar {purpose} {ranks}"

    def name(ranks: list[int]) -> str:
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    # torch has no argument for the name, which is replaced for the time of the call.
    torchs_name = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = name
    world = distributed_c10d._get_default_group()
    bound = world.bound_device_id
    try:
        # From a world that is bound to a device torch splits groups off, and all of its ranks would
        # have to come.
        if bound is not None:
            world.bound_device_id = None
        group: dist.ProcessGroup = dist.new_group(
            list(ranks),
            timeout=late(),
            use_local_synchronization=True,
            device_id=bound or _own_device(),
        )
    finally:
        distributed_c10d._hash_ranks_to_str = torchs_name
        if bound is not None:
            world.bound_device_id = bound
    return group


def _own_device() -> torch.device | None:
    """The device that a group is bound to; None where a backend does not ask for one."""
    # With a device NCCL connects the members now, in the order in which groups are made. Without
    # one it would do so in the first messages, and the program would wait in each.
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return None
