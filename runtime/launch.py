"""Starting ranks: forked Gloo ranks on this machine, or a process group from the environment that `torchrun` sets."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from autopar.errors import RunError

GRACE = 0.5
"""Seconds that the other ranks are given to report after the first has failed, so that the cause is found."""


@dataclass(slots=True)
class _Rank:
    """A forked rank as its parent sees it."""

    number: int
    process: ForkProcess
    pipe: Connection
    result: Any = None
    error: str | None = None
    done: bool = False

    def read(self) -> None:
        """Take what the rank sent, or note that it ended without a word."""
        try:
            done, payload = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(GRACE)
            code = self.process.exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
            self.error = f"rank {self.number} {how} before it was done"
            return
        self.done = done
        if done:
            self.result = payload
        else:
            self.error = f"rank {self.number} failed:\n{payload}"


def run_ranks(function: Callable[..., Any], nproc: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """Call `function(*args)` on `nproc` forked ranks joined by Gloo; the results in the order of the ranks.

    A rank that raises or dies ends the others; its traceback is in the `RunError`. `timeout` in seconds bounds the whole
    call and every collective in it.
    """
    if nproc < 1:
        raise RunError(f"cannot run {nproc} ranks")
    threads = max(1, (os.cpu_count() or 1) // nproc) if _release_threads() else 1
    context = multiprocessing.get_context("fork")
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="autopar_") as folder:
        store = Path(folder, "store").as_uri()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for number in range(nproc):
                reader, writer = context.Pipe(duplex=False)
                inherited = [rank.pipe for rank in ranks] + [reader]
                arguments = (writer, inherited, store, number, nproc, threads, timeout, function, args)
                process = context.Process(target=_rank_main, args=arguments, daemon=True, name=f"rank {number}")
                process.start()
                writer.close()
                ranks.append(_Rank(number=number, process=process, pipe=reader))
            return _collect(ranks, timeout)
        finally:
            _end(ranks)


def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
    """Wait for all ranks, or for the first failure and what explains it."""
    deadline = time.monotonic() + timeout
    pending = {rank.pipe: rank for rank in ranks}
    failed: list[_Rank] = []
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            rank.read()
            if rank.error is not None:
                if not failed:
                    deadline = min(deadline, time.monotonic() + GRACE)
                failed.append(rank)
    if failed:
        # A rank that died without a word explains the broken connections that its peers report.
        cause = min(failed, key=lambda rank: not str(rank.error).endswith("before it was done"))
        raise RunError(cause.error)
    if pending:
        late = ", ".join(str(rank.number) for rank in pending.values())
        raise RunError(f"rank {late} did not finish within {timeout:g} s")
    return [rank.result for rank in ranks]


def _end(ranks: list[_Rank]) -> None:
    """Leave no process behind: those that are done exit by themselves, the others are killed."""
    for rank in ranks:
        if rank.done:
            rank.process.join(GRACE)
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join()
        rank.process.close()
        rank.pipe.close()


def _rank_main(
    pipe: Connection,
    inherited: list[Connection],
    store: str,
    rank: int,
    world: int,
    threads: int,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The life of a forked rank: it ends by `os._exit`, without the parent's exit handlers."""
    for end in inherited:
        end.close()
    status = 1
    try:
        torch.set_num_threads(threads)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
        payload = pickle.dumps((True, function(*args)))
        dist.barrier()
        status = 0
    except BaseException:
        payload = pickle.dumps((False, traceback.format_exc()))
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(payload)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _release_threads() -> bool:
    """Let OpenMP's worker threads go: a forked child hangs in its first parallel region if its parent had a pool.

    False where the library does not offer it; the ranks then run on one thread each.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        names = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "omp" in line and ".so" in line}
        libraries = [name for name in names if Path(name).name.startswith(("libgomp", "libiomp", "libomp"))]
        return bool(libraries) and all(ctypes.CDLL(name).omp_pause_resource_all(1) == 0 for name in libraries)
    except (OSError, AttributeError, IndexError):
        return False


def init_from_environment(backend: str, *, timeout: float = 600.0) -> torch.device:
    """Join the process group that `torchrun` (or a like launcher) describes in the environment; this rank's device.

    Restarted ranks meet under a fresh prefix of the store, so that they do not read the addresses of the dead.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise RunError(f"{', '.join(missing)} not set: start this program with torchrun, e.g. `torchrun --nproc-per-node 4 train.py`")
    if backend not in ("gloo", "nccl"):
        raise RunError(f"unknown backend {backend!r}: valid are gloo, nccl")
    device = _cuda_device() if backend == "nccl" else torch.device("cpu")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=timeout)
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    server = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, hosts_store, limit, multi_tenant=True)
    store = PrefixStore(f"run_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", server)
    bound = device if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit, device_id=bound)
    return device


def require_cuda() -> None:
    """Refuse the backend nccl where there is no GPU."""
    if not torch.cuda.is_available():
        raise RunError("the backend nccl needs CUDA, which torch does not find here; use the backend gloo")


def _cuda_device() -> torch.device:
    """The GPU of this rank, made current."""
    require_cuda()
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    count = torch.cuda.device_count()
    if local >= count:
        raise RunError(f"local rank {local} has no GPU: this machine has {count}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
