"""A process group from the environment that `torchrun` (or a like launcher) sets."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from autopar.errors import RunError

from .failing_ranks import WITH_OTHERS, Lives
from .heartbeat import watch_in_steps
from .rank_process import die_with


def init_from_environment(
    backend: str, *, timeout: float = 600.0, lives: Lives | None = None
) -> torch.device:
    """Join the process group in the environment of `torchrun` (or the like); this rank's device.

    Restarted ranks meet under a fresh prefix of the store, so that they do not read the addresses
    of the dead. With `lives`, ranks that keep failing are left out, and RANK and WORLD_SIZE are
    those of the rest.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise RunError(
            f"{', '.join(missing)} not set: start this program with torchrun,"
            " e.g. `torchrun --nproc-per-node 4 train.py`"
        )
    if backend not in ("gloo", "nccl"):
        raise RunError(f"unknown backend {backend!r}: valid are gloo, nccl")
    device = _cuda_device() if backend == "nccl" else torch.device("cpu")
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    # By default a rank would wait half an hour in a collective of Gloo for one that hangs.
    limit = timedelta(seconds=timeout)
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # The agent of torchrun serves a store at this very address already.
    hosts_store = rank == 0 and not of_launcher
    server = TCPStore(address, port, world, hosts_store, limit, multi_tenant=True)
    # A launcher's store outlives its ranks; a store of rank 0 does not, and launchers of several
    # machines count restarts separately.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if of_launcher else "0"
    store = PrefixStore(f"run_{restart}", server)
    # A torchrun that is killed outright cannot end its ranks.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())
    if lives is not None:
        rank, world = lives.leave_out(PrefixStore(f"lives_{restart}", server), limit)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    if world > 1:
        # A connection of its own: the watch must not wait behind another thread's request.
        own = TCPStore(address, port, None, False, limit, multi_tenant=True)
        give_up = None if lives is None else partial(lives.ended, WITH_OTHERS)
        watch_in_steps(PrefixStore(f"beats_{restart}", own), rank, world, give_up)
    # With a device NCCL connects the ranks now, and not in the first collective.
    bound = device if backend == "nccl" else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=limit, device_id=bound
    )
    return device


def init_alone(backend: str) -> None:
    """Form a process group of this process alone."""
    device = _cuda_device() if backend == "nccl" else None
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=device)


def require_cuda() -> None:
    """Refuse the backend nccl where there is no GPU."""
    if not torch.cuda.is_available():
        raise RunError(
            "the backend nccl needs CUDA, which torch does not find here; use the backend gloo"
        )


def _cuda_device() -> torch.device:
    """The GPU of this rank, made current."""
    require_cuda()
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    count = torch.cuda.device_count()
    if local >= count:
        raise RunError(f"local rank {local} has no GPU: this machine has {count}")
    # NCCL works on the current GPU; without this all ranks of a machine would share the first.
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
