"""`run_ranks`: a function on Gloo ranks of this machine, from any process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar.errors import RunError

from .fork_server import run_clean
from .forked_ranks import fork_ranks, quiet_fork
from .rank_process import BACKEND


def run_ranks(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout: float = 300.0,
    endless: bool = False,
) -> list[Any]:
    """Call `function(*args)` on `nproc` Gloo ranks of this machine; the results by rank.

    A rank that raises, dies or falls silent ends the others; its traceback is in the `RunError`.
    `timeout`: seconds that bound the whole call, in which a rank may be 10 minutes late to a
    collective; if the call is `endless`, seconds that a rank may be late. SIGTERM to this process
    goes to the ranks, where `autopar.steps` saves and ends. Then this process ends too, with exit
    code 0, or by the signal if the ranks do not end in good order within 30 seconds.

    Ranks are forked from this process, so nothing is copied. If autograd has started threads for
    devices here, which no fork survives, function and arguments are pickled for a process that has
    run nothing (`fork_server`).
    """
    if nproc < 1:
        raise RunError(f"cannot run {nproc} ranks")
    if not hasattr(os, "fork"):
        raise RunError(
            "this system cannot fork, so no ranks run here: plan and report here, "
            "and run the plan on Linux"
        )
    if not can_fork():
        return run_clean(function, nproc, args, timeout, endless=endless)
    return fork_ranks(function, nproc, args, timeout, endless=endless)


@contextlib.contextmanager
def forked_on(backend: str | None) -> Iterator[str]:
    """Inside, ranks are forked on a backend; its name.

    None: that of the environment variable `AUTOPAR_BACKEND`, or else gloo.
    """
    before = os.environ.get(BACKEND)
    chosen = backend or before or "gloo"
    # Forks and the process that forks for others get the environment, whatever lies between.
    os.environ[BACKEND] = chosen
    try:
        yield chosen
    finally:
        os.environ.pop(BACKEND)
        if before is not None:
            os.environ[BACKEND] = before


def can_fork() -> bool:
    """Whether a backward pass works in a fork of this process.

    It is tried, since torch does not tell.
    """
    with quiet_fork():
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with torch.inference_mode(False), torch.enable_grad():
                value = torch.ones(1, device="cpu", requires_grad=True)
                value.sum().backward()  # type: ignore[no-untyped-call]
            status = 0
        finally:
            os._exit(status)
    try:
        return os.waitpid(pid, 0)[1] == 0
    except ChildProcessError:
        # This process has the kernel bury its children, so nobody learns how they ended.
        return False
