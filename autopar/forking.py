"""Forked processes: how many there may be, and what must come first."""

from __future__ import annotations

import gc
import multiprocessing
import os
import platform
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import UsageError

FORKS = platform.system() == "Linux" and hasattr(os, "fork")
"""Whether processes are forked: elsewhere a library's threads may not live through it."""
FEW = 16
"""Ranks of one machine that may have as much memory each as their parent."""
_beside = False
"""Whether this process is one of several that were forked for the same work."""


def cores() -> int:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processes(jobs: int | None) -> int:
    """The processes that work may be spread over, this one among them.

    `jobs`: the wanted number (None: as many as cores, shared with other ranks here). It is 1 on
    systems without a safe fork, in a process that may have no children, and in one of several that
    were forked for the same work.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs is {jobs}, it must be at least 1")
    # A process that ends with its parent may have no children.
    if not FORKS or _beside or multiprocessing.current_process().daemon:
        return 1
    return max(cores() // _ranks(), 1) if jobs is None else jobs


def _ranks() -> int:
    """The ranks that torchrun started on this machine, each of which may plan."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(said), 1) if said.isdecimal() else 1


def be_beside() -> None:
    """Mark a process that was just forked for work: all its own work is done in itself."""
    global _beside
    _beside = True
    # Ctrl-C reaches all processes: the parent ends these, and says what there is to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def free_garbage(ranks: int) -> None:
    """Free objects that refer to themselves, as one of so many ranks.

    Of more than `FEW` that were forked each frees young ones alone: to look at its parent's copies
    every page of them, which takes as much as an import leaves.
    """
    forked = type(multiprocessing.current_process()).__name__ == "ForkProcess"
    gc.collect(1 if forked and ranks > FEW else 2)


@contextmanager
def forking() -> Iterator[None]:
    """Fork without warnings, and without Ctrl-C between the locks that this takes."""
    with warnings.catch_warnings():
        # The children run Python and numpy alone, and take no lock of the parent's threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        if not hasattr(signal, "pthread_sigmask"):
            yield
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def keep_forkable() -> None:
    """Start autograd's engine while it sees no device, so that it starts no threads.

    Forked processes would not have these threads.

    The first backward pass of a process starts a thread for each device that torch then sees, and a
    process forked later cannot run a backward pass. Fake tensors make torch see devices that are
    not there. With a real device nothing is done.
    """
    import torch

    if not torch.accelerator.is_available():
        with torch.inference_mode(False), torch.enable_grad():
            one = torch.ones(1, device="cpu", requires_grad=True)
            one.sum().backward()  # type: ignore[no-untyped-call]
