"""A process group from the environment that a launcher sets: torchrun, srun, mpirun."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from autopar.errors import RunError

from .backends import device_type, require_backend, require_known
from .devices import Claim, claim, own_device, remember
from .failing_ranks import WITH_OTHERS, Lives
from .heartbeat import watch_in_steps
from .launchers import launched, require_launched
from .rank_process import LATE, die_with


def init_from_environment(
    backend: str, *, timeout: float = LATE, lives: Lives | None = None
) -> torch.device:
    """Join the process group that the launcher's environment describes; this rank's device.

    `timeout`: seconds that a rank may be late to a collective. Where a rank has no device of its
    own, or another backend, every rank raises `RunError`. Restarted ranks meet under a fresh prefix
    of the store, so that they do not read the addresses of the dead. With `lives`, ranks that keep
    failing are left out, and RANK and WORLD_SIZE are those of the rest.
    """
    require_known(backend)
    if backend == "mpi" or launched() is None:
        require_backend(backend)
    # MPI numbers its ranks itself, and has no store.
    if backend == "mpi":
        dist.init_process_group("mpi")
        return torch.device("cpu")
    place = require_launched(os.environ)
    rank = place.rank
    world = place.world
    # By default a rank would wait half an hour in a collective of Gloo for one that hangs.
    limit = timedelta(seconds=timeout)
    server = _meet(rank, world, limit)
    restart = _restart()
    # A torchrun that is killed outright cannot end its ranks.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())
    if lives is not None:
        rank, world = lives.leave_out(PrefixStore(f"lives_{restart}", server), limit)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    device = _claimed_device(backend, PrefixStore(f"devices_{restart}", server), rank, world)
    if world > 1:
        # A connection of its own: the watch must not wait behind another thread's request.
        own = PrefixStore(f"beats_{restart}", _meet(None, None, limit))
        give_up = None if lives is None else partial(lives.ended, WITH_OTHERS)
        watch_in_steps(own, rank, world, give_up)
    _init(backend, PrefixStore(f"run_{restart}", server), rank, world, limit, device)
    return device


def init_alone(backend: str) -> None:
    """Form a process group of this process alone."""
    require_backend(backend)
    device = own_device(device_type(backend))
    _init(backend, HashStore(), 0, 1, None, device)


def _init(
    backend: str, store: Store, rank: int, world: int, limit: timedelta | None, device: torch.device
) -> None:
    """Make the process group of all ranks."""
    # With a device NCCL connects the ranks now, and not in the first collective.
    bound = None if device.type == "cpu" else device
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=limit, device_id=bound
    )
    remember(device)


def _of_agent() -> bool:
    """Whether the agent of torchrun serves a store at the address of the ranks already."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _restart() -> str:
    """The number of this life of the ranks, which prefixes their keys in the store."""
    # A launcher's store outlives its ranks; a store of rank 0 does not, and launchers of several
    # machines count restarts separately.
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _of_agent() else "0"


def _meet(rank: int | None, world: int | None, limit: timedelta) -> TCPStore:
    """The store of all ranks; with a `rank`, once all of the `world` have come."""
    hosts = rank == 0 and not _of_agent()
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, world, hosts, limit, multi_tenant=True)


def _claimed_device(backend: str, store: Store, rank: int, world: int) -> torch.device:
    """This rank's device, which no other rank has; where one rank has none, all raise."""
    try:
        require_backend(backend)
        device = own_device(device_type(backend))
    except RunError as error:
        # The others wait for this rank, so it tells them first.
        claim(Claim(backend=backend, error=str(error)), store, rank, world)
        raise
    claim(Claim.of(backend, device), store, rank, world)
    return device
