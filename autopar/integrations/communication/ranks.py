"""The process group of all ranks, their numbers, and groups of them by name or by ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from autopar.errors import RunError, UsageError, unknown
from autopar.integrations.mindspore.context import current, target_backend

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Group = str | Sequence[int] | ProcessGroup | None
else:
    Group = Any

WORLD = "world"
_NAMED: dict[str, tuple[int, ...]] = {}


def init(backend: str | None = None, *, timeout: float = 600.0) -> None:
    """Join the process group of all ranks that the launcher's environment describes.

    Ranks and their devices are those of torchrun, mpirun or srun; MASTER_ADDR and MASTER_PORT say
    where they meet. `timeout`: seconds that a rank may be late. `backend`: nccl (NVIDIA GPUs), gloo
    (CPUs), hccl (Ascend, where torch_npu is installed), mpi (where torch was built with it); by
    default that of `autopar.set_context`, or else of the device at hand. If the context sets
    `global_rank` and `device_num`, they overrule the environment. An existing process group is used
    if it has the wanted backend.
    """
    import torch.distributed as dist

    from autopar.runtime.launch.backends import default_backend, require_backend, require_known
    from autopar.runtime.launch.environment import init_from_environment

    chosen = backend or target_backend() or default_backend()
    require_known(chosen)
    # Whether a package is there is known at once, before ranks wait for each other.
    if chosen in ("hccl", "mpi") and not dist.is_initialized():
        require_backend(chosen)
    if dist.is_initialized():
        if backend is not None and backend not in dist.get_backend():
            raise UsageError(
                f"the process group's backend is {dist.get_backend()}, not {backend}: end it with "
                "destroy() first"
            )
        return
    for name, key in (("RANK", "global_rank"), ("WORLD_SIZE", "device_num")):
        if current().given(key):
            os.environ[name] = str(getattr(current(), key))
    init_from_environment(chosen, timeout=timeout)


def destroy() -> None:
    """Leave the process group of all ranks, and forget all groups."""
    import torch.distributed as dist

    _NAMED.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def create_group(name: str, ranks: Sequence[int]) -> None:
    """Name the group of these ranks, numbered in ascending order.

    Each of them calls this at the same point.
    """
    world = get_group_size()
    wanted = tuple(sorted(int(rank) for rank in ranks))
    if name == WORLD or name in _NAMED:
        raise UsageError(f"there is a group called {name!r} already")
    if (
        not wanted
        or len(set(wanted)) != len(wanted)
        or not all(0 <= rank < world for rank in wanted)
    ):
        raise UsageError(
            f"group {name!r}: ranks {list(ranks)} are not distinct ranks from 0 to {world - 1}"
        )
    _NAMED[name] = wanted
    if get_rank() in wanted:
        process_group(name)


def destroy_group(name: str) -> None:
    """Forget the name of a group."""
    _NAMED.pop(_known(name), None)


def get_rank(group: Group = None) -> int:
    """This process's number among all ranks, or within a group."""
    import torch.distributed as dist

    require_init()
    return dist.get_rank() if group is None else ranks_of(group).index(member(group))


def get_group_size(group: Group = None) -> int:
    """The number of ranks, of all or of a group."""
    import torch.distributed as dist

    require_init()
    return dist.get_world_size() if group is None else len(ranks_of(group))


def get_world_rank_from_group_rank(group: Group, rank: int) -> int:
    """The global number of rank `rank` of a group."""
    ranks = ranks_of(group)
    if not 0 <= rank < len(ranks):
        raise UsageError(f"the group has the ranks 0 to {len(ranks) - 1}, not {rank}")
    return ranks[rank]


def get_group_rank_from_world_rank(rank: int, group: Group) -> int:
    """The number within a group of rank `rank`."""
    ranks = ranks_of(group)
    if rank not in ranks:
        raise UsageError(f"rank {rank} is none of the group {list(ranks)}")
    return ranks.index(rank)


def require_init() -> None:
    """Raise where no ranks run."""
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RunError(
            "there is no process group: call autopar.communication.init() first, in a program "
            "started with torchrun"
        )


def _known(name: str) -> str:
    if name != WORLD and name not in _NAMED:
        raise UsageError(unknown("group", name, (WORLD, *_NAMED)))
    return name


def ranks_of(group: Group) -> tuple[int, ...]:
    """The ranks of a group."""
    import torch.distributed as dist

    require_init()
    if group is None or group == WORLD:
        return tuple(range(dist.get_world_size()))
    if isinstance(group, str):
        return _NAMED[_known(group)]
    if isinstance(group, list | tuple | range):
        return tuple(sorted(int(rank) for rank in group))
    return tuple(dist.get_process_group_ranks(cast("ProcessGroup", group)))


def member(group: Group) -> int:
    """This rank, which must be one of the group."""
    import torch.distributed as dist

    if dist.get_rank() not in ranks_of(group):
        raise UsageError(
            f"rank {dist.get_rank()} is none of the group {list(ranks_of(group))}, so it takes no "
            "part in its collectives"
        )
    return dist.get_rank()


def process_group(group: Group) -> ProcessGroup:
    """torch's process group, of which this rank must be one."""
    from autopar.runtime.ranks.process_groups import group_of

    member(group)
    return group_of(ranks_of(group))
