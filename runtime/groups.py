"""Process groups: each made once a process, by its members alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

Key = tuple[tuple[int, ...], bool]


@dataclass(slots=True)
class _Groups:
    """The process groups made so far, within the process group of all ranks that is initialised at the time."""

    world: Any = None
    made: dict[Key, dist.ProcessGroup] = field(default_factory=dict)


_GROUPS = _Groups()


def group_of(ranks: Sequence[int], *, messages: bool = False) -> dist.ProcessGroup:
    """The group of these ranks, of which this is one.

    That for `messages` between two ranks is another one: collectives of a group are counted, and ranks send unequal numbers of messages.
    """
    if _GROUPS.world is not dist.group.WORLD:
        _GROUPS.world, _GROUPS.made = dist.group.WORLD, {}
    key = tuple(ranks), messages
    if key not in _GROUPS.made:
        world = dist.group.WORLD if key == (tuple(range(dist.get_world_size())), False) else None
        _GROUPS.made[key] = world if world is not None else _new_group(key)
    return _GROUPS.made[key]


def _new_group(key: Key) -> dist.ProcessGroup:
    """A group under a name of its own.

    Torch names a group that its members make alone after the number of groups that a process has. Members need not have equally many:
    then they would wait for one another under different names for ever.
    """
    ranks, messages = key
    text = f"autopar {'messages' if messages else 'collectives'} {ranks}"

    def name(ranks: list[int]) -> str:
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    naming = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = name
    try:
        found: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = naming
    return found
