"""The backend `strict`: Gloo under the rules of NCCL, and a program that breaks one is told which.

A program that is right on Gloo may hang on NCCL. Here it ends with an error that names the rule,
the ranks, the group, the action of the step, and the orders of both ranks:

- A communicator is one queue. Its collectives come in one order on all ranks, equal in kind, type
  and size.
- A group made from a world that is bound to a device is a split, a collective of the whole world.
- A send waits for its receive. Both directions of a pair share the queue, unless they are batched;
  a batch must be a batch at either end.
- Tensors are contiguous, of a type that NCCL has, on the device of the group.
- An operation may end late, and its results are garbage until it has been waited for.
- A backward pass runs on a thread of autograd, not on the caller's.

Ranks that wait for each other are told as well, so nothing hangs. The backend needs torch's private
operators `c10d::...`; it is made for tests and for `autopar doctor`.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from . import operations
from .autograd_threads import run_backward_on_a_thread
from .communicator import Communicator
from .kernels import BATCHES, COMMUNICATORS, KERNELS
from .progress import Progress, Wait

NAME = "strict"
BOUND = torch.device("meta", 0)
"""The device to which the world is bound: torch binds to no CPU."""
_TICK = 0.002

_Group = dist.ProcessGroup
_plain_start = _Group._start_coalescing
_plain_end = _Group._end_coalescing


class _Gloo(dist.ProcessGroupGloo):
    """Gloo, which says of itself what NCCL says."""

    @property
    def supports_splitting(self) -> bool:
        """Whether groups are made by splits of a bound world."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Whether messages may be batched."""
        return True

    def perform_nocolor_split(self, device: object) -> None:
        """Take part in a split from which this rank gets no group."""
        world = COMMUNICATORS[str(dist.group.WORLD.group_name)]  # type: ignore[union-attr]
        world.issue(operations.split(())).wait()

    def eager_connect_single_device(self, device: object) -> None:
        """Connect the ranks; Gloo has done so."""


@dataclass(slots=True)
class _State:
    """The backend of this process: the watch, and what must stay alive."""

    progress: Progress | None = None
    library: Any = None
    alive: list[_Gloo] = field(default_factory=list)


_STATE = _State()


def init_process_group(
    *, store: Store, watch: Store, rank: int, world_size: int, timeout: timedelta
) -> None:
    """Join a strict world that is bound to a device, as `dist.init_process_group` does.

    `watch`: another connection to the store, for the thread that looks for deadlocks.
    """
    _STATE.progress = Progress(rank, world_size, watch)
    _register()
    dist.init_process_group(NAME, store=store, rank=rank, world_size=world_size, timeout=timeout)
    # `init_process_group` itself takes no device for ranks on CPUs.
    _world().bound_device_id = BOUND
    run_backward_on_a_thread()


def _world() -> dist.ProcessGroup:
    world: dist.ProcessGroup = distributed_c10d._get_default_group()
    return world


def _register() -> None:
    """Make backend and kernels known in this process, once."""
    if _STATE.library is not None:
        return
    devices = ["cpu", BOUND.type]
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
    # Gloo serves GPUs too, so torch takes a group of Gloo in a world that is bound to one.
    dist.Backend.backend_capability["gloo"].append(BOUND.type)
    library: Any = torch.library.Library
    _STATE.library = library("c10d", "IMPL")
    with warnings.catch_warnings():
        # torch warns that its own kernels are replaced, which is what is wanted.
        warnings.simplefilter("ignore")
        for name, kernel in KERNELS.items():
            for key in ("CPU", "Meta"):
                _STATE.library.impl(name, kernel, key, allow_override=True)
    group: Any = _Group
    group._start_coalescing = _start_batch
    group._end_coalescing = _end_batch


def _create(options: Any, _: object) -> _Gloo:
    """The backend of a group on this rank, a member."""
    assert _STATE.progress is not None
    of_world = not options.global_ranks_in_group
    ranks = tuple(options.global_ranks_in_group or range(options.group_size))
    if not of_world:
        _meet_members(options.group_id, ranks)
    gloo = _Gloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    # torch finds the half of a backend that is written in Python only while somebody holds it.
    _STATE.alive.append(gloo)
    COMMUNICATORS[options.group_id] = Communicator(options.group_id, ranks, gloo, _STATE.progress)
    return gloo


def _meet_members(name: str, ranks: tuple[int, ...]) -> None:
    """Wait for the ranks that make a group: all of the world in a split, or else the members."""
    world = _world()
    if world.bound_device_id is not None:
        # Ranks outside come by `perform_nocolor_split`, if they make the group, too.
        COMMUNICATORS[world.group_name].issue(operations.split(ranks)).wait()
        return
    progress = _STATE.progress
    assert progress is not None
    # Gloo itself would wait in the store, where nobody sees for whom.
    store = world.get_group_store()
    store.set(f"making/{name}/{progress.rank}", "")
    missing = [rank for rank in ranks if rank != progress.rank]
    while missing:
        text = f"ranks {tuple(missing)} to make the group {ranks}"
        with progress.waiting(Wait(text=text, group=name, peers=tuple(missing))):
            while not store.check([f"making/{name}/{missing[0]}"]):
                progress.check()
                time.sleep(_TICK)
        missing = missing[1:]


def _start_batch(group: Any, device: torch.device) -> None:
    if group.group_name in COMMUNICATORS:
        BATCHES[group.group_name] = []
    else:
        _plain_start(group, device)


def _end_batch(group: Any, device: torch.device) -> Any:
    if group.group_name not in COMMUNICATORS:
        return _plain_end(group, device)
    # torch batches on Gloo by starting one message after the other, so Gloo is not asked.
    batch = BATCHES.pop(group.group_name)
    communicator = COMMUNICATORS[group.group_name]
    return communicator.issue(operations.messages(batch, communicator.ranks))
