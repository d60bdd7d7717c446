"""The timing and weighing of contenders.

Time: ours and the rival run on the same ranks, step by step in turn, each beginning every other
round; the ratio is the median over the rounds. Memory: each runs alone in ranks of its own. It is
the highest resident memory of a rank during a step (`VmHWM`, reset before it) above the rank's
memory before anything was made. Large tensors are mapped one by one, so freed memory leaves it.
Imports of contenders are made before ranks are forked.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks

from .contenders import RIVALS, Step, ours, plan_of, shares
from .gpt2 import Shape

WARM = 2
"""Untimed steps of each before the first timed one."""
TIMEOUT = 300.0
IMPORTED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
)
"""Modules that torch or a contender imports on first use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One race of a plan and its rival.

    Seconds are medians of steps, `ratio` is the median of ours / rival, `loss_error` the largest
    difference of a loss.
    """

    scheme: str
    rival: str
    ranks: int
    width: int
    ours_s: float
    rival_s: float
    ratio: float
    memory_ratio: float | None
    ours_mb: float | None
    rival_mb: float | None
    loss_error: float

    def as_json(self) -> dict[str, Any]:
        """The row as an object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A race that was not run, and why."""

    scheme: str
    rival: str
    ranks: int
    width: int
    why: str


def race(
    rival: str, shape: Shape, ranks: int, rounds: int, *, memory: bool = True
) -> Row | LeftOut:
    """One row."""
    for name in IMPORTED:
        importlib.import_module(name)
    chosen = RIVALS[rival]
    head = {"scheme": chosen.scheme, "rival": rival, "ranks": ranks, "width": shape.width}
    if chosen.stages and shape.layers % ranks:
        return LeftOut(**head, why=f"{shape.layers} layers make no {ranks} equal stages")  # type: ignore[arg-type]
    try:
        plan = plan_of(shape, ranks, chosen.asked, stages=chosen.stages)
    except AutoparError as error:
        return LeftOut(**head, why=str(error))  # type: ignore[arg-type]
    seconds = run_ranks(_timed, ranks, rival, shape, plan, rounds, timeout=TIMEOUT)[0]
    if isinstance(seconds, str):
        return LeftOut(**head, why=seconds)  # type: ignore[arg-type]
    mine, theirs, error = seconds
    if memory:
        weighed = [peak(lambda: ours(shape, plan), ranks), peak(lambda: chosen.build(shape), ranks)]
    else:
        weighed = [None, None]
    ratio = weighed[0] / weighed[1] if weighed[0] and weighed[1] else None
    return Row(
        **head,  # type: ignore[arg-type]
        ours_s=statistics.median(mine),
        rival_s=statistics.median(theirs),
        ratio=statistics.median(a / b for a, b in zip(mine, theirs, strict=True)),
        memory_ratio=ratio,
        ours_mb=weighed[0],
        rival_mb=weighed[1],
        loss_error=error,
    )


def _timed(
    rival: str, shape: Shape, plan: Plan, rounds: int
) -> tuple[list[float], list[float], float] | str:
    """Time the steps of ours and of the rival on a rank, and compare their losses."""
    torch.set_num_threads(1)
    try:
        mine = ours(shape, plan)
    except AutoparError as error:
        return str(error)
    contenders: list[tuple[Step, bool]] = [
        (mine, False),
        (RIVALS[rival].build(shape), shares(rival)),
    ]
    seconds: tuple[list[float], list[float]] = ([], [])
    error = 0.0
    for number in range(WARM + rounds):
        losses = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            step, shared = contenders[which]
            taken, loss = step_seconds(step, number)
            if number >= WARM:
                seconds[which].append(taken)
            losses[which] = whole_loss(loss, shared)
        error = max(error, abs(losses[0] - losses[1]) / abs(losses[1]))
    return *seconds, error


def step_seconds(step: Step, number: int) -> tuple[float, Tensor | None]:
    """From when all ranks are there to when the last is done."""
    dist.barrier()
    start = time.perf_counter()
    loss = step(number)
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken), loss


def whole_loss(loss: Tensor | None, shared: bool) -> float:
    """The loss of the whole batch.

    The mean of the ranks' losses of their parts, else that of any rank that has it.
    """
    total = torch.tensor([float(loss) if loss is not None else 0.0, float(loss is not None)])
    dist.all_reduce(total)
    assert shared or total[1] > 0
    return float(total[0] / total[1])


# --- memory ---


def peak(build: Callable[[], Step], ranks: int) -> float | None:
    """Megabytes of the fullest rank; None where the system does not tell."""
    peaks = run_ranks(_peak, ranks, build, timeout=TIMEOUT)
    return None if None in peaks else max(peaks)


def _peak(build: Callable[[], Step]) -> float | None:
    torch.set_num_threads(1)
    _map_large_tensors()
    dist.barrier()
    before = _resident("VmRSS")
    step = build()
    for number in range(WARM):
        step(number)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    dist.barrier()
    step(WARM)
    return _resident("VmHWM") - before


def _map_large_tensors() -> None:
    """Have glibc take memory of 64 KiB and more from the system, and give it back at once.

    What is unused now is given back as well, so that it is not given back while a step is measured.
    """
    threshold = -3
    trim = -1
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(threshold, 64 * 1024)
        library.mallopt(trim, 64 * 1024)
        gc.collect()
        library.malloc_trim(0)


def _resident(field: str) -> float:
    """A figure of this process, in megabytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kilobytes) * 1024 / 1e6
