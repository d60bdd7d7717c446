"""A command that starts itself again on every GPU: forked ranks cannot share a driver."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from dataclasses import dataclass

import torch

from autopar.errors import RunError

from .launchers import launched

TAIL = 40
"""The last lines of ranks that are kept in case they end without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaunched:
    """The end of the ranks that torchrun has started: its exit code, and their last lines."""

    code: int
    tail: str


def relaunched(
    nproc: int | None, backend: str | None = None, *, least: int = 1
) -> Relaunched | None:
    """Run this process's own command on a rank for each GPU, or on `nproc` of them.

    None where the command runs here: under a launcher, on a machine without GPUs, and with
    a `backend` other than nccl. Raises `RunError` if there are fewer than the `least` GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus or launched() is not None or backend not in (None, "nccl"):
        return None
    if gpus < least:
        raise RunError(
            f"this needs {least} ranks, and the machine has {gpus} GPU; with --backend gloo ranks "
            "run on its CPU"
        )
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    process = subprocess.Popen(
        [sys.executable, *words, str(min(nproc or gpus, gpus)), "-m", "autopar", *sys.argv[1:]],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    tail: deque[str] = deque(maxlen=TAIL)
    for line in process.stderr:
        sys.stderr.write(line)
        tail.append(line)
    return Relaunched(code=process.wait(), tail="".join(tail))
