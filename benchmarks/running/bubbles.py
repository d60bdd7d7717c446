"""Seconds that stages wait for each other: measured, and priced by the plan.

    measured = 1 - C / T of the stage that waits least      priced = bubble / (step - update)

T is the time of the forward and backward passes of a step on a rank, C the processor time of the
thread that makes them, which sleeps while it waits. Both are shares of the passes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks

from .contenders import adamw, plan_of
from .gpt2 import Shape, batch
from .models import model
from .races import TIMEOUT, WARM, LeftOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """Shares of the forward and backward passes."""

    schedule: str
    stages: int
    micro_batches: int
    measured: float
    priced: float

    def as_json(self) -> dict[str, Any]:
        """The row as an object."""
        return asdict(self)


def bubble(
    schedule: str, shape: Shape, stages: int, micro_batches: int, rounds: int
) -> Bubble | LeftOut:
    """One row, or why there is none."""
    asked = {"schedule": schedule, "micro_batches": micro_batches}
    try:
        plan = plan_of(shape, stages, asked, stages=True)
    except AutoparError as error:
        return LeftOut(scheme=schedule, rival="", ranks=stages, width=shape.width, why=str(error))
    shares = run_ranks(_shares, stages, shape, plan, rounds, timeout=TIMEOUT)
    if isinstance(shares[0], str):
        return LeftOut(scheme=schedule, rival="", ranks=stages, width=shape.width, why=shares[0])
    return Bubble(
        schedule=schedule,
        stages=stages,
        micro_batches=micro_batches,
        measured=min(shares),
        priced=plan.predicted.bubble / (plan.predicted.step - plan.predicted.update),
    )


def _shares(shape: Shape, plan: Plan, rounds: int) -> float | str:
    """On a rank: the share of the passes that it waits, the median of the rounds."""
    torch.set_num_threads(1)
    try:
        module = autopar.parallelize(model(shape), plan)
    except AutoparError as error:
        return str(error)
    optimizer = adamw(module.parameters())
    shares = []
    for number in range(WARM + rounds):
        optimizer.zero_grad()
        inputs = batch(shape, number)
        dist.barrier()
        share = waiting(lambda inputs=inputs: module(*inputs).backward())
        shares += [share] * (number >= WARM)
        optimizer.step()
    return statistics.median(shares)


def waiting(work: Callable[[], object]) -> float:
    """The share of its time that this thread sleeps in some work."""
    begun = time.perf_counter()
    computed = time.thread_time()
    work()
    return 1.0 - (time.thread_time() - computed) / (time.perf_counter() - begun)
