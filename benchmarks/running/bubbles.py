"""Seconds that stages wait for each other: measured, and priced by the plan.

    measured = 1 - (T(2 m) - T(m)) / (T(m) - U)      priced = bubble / (step - update)

T(m) is a step of m micro-batches of one size, U its update; without waiting, m more micro-batches
take as long as m. Both are shares of the passes.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks

from .contenders import adamw, ours, plan_of
from .gpt2 import Shape, batch, model
from .races import TIMEOUT, WARM, LeftOut, step_seconds


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
    """One row; the batch of `shape` is that of `micro_batches`."""
    shapes = [replace(shape, batch=shape.batch * factor) for factor in (1, 2)]
    try:
        asked = [
            {"schedule": schedule, "micro_batches": micro_batches * factor} for factor in (1, 2)
        ]
        plans = [plan_of(s, stages, a, stages=True) for s, a in zip(shapes, asked, strict=True)]
    except AutoparError as error:
        return LeftOut(scheme=schedule, rival="", ranks=stages, width=shape.width, why=str(error))
    seconds = run_ranks(_steps, stages, shapes, plans, rounds, timeout=TIMEOUT)[0]
    if isinstance(seconds, str):
        return LeftOut(scheme=schedule, rival="", ranks=stages, width=shape.width, why=seconds)
    once, twice, update = seconds
    priced = plans[0].predicted.bubble / (plans[0].predicted.step - plans[0].predicted.update)
    measured = measured_share(once, twice, update)
    return Bubble(
        schedule=schedule,
        stages=stages,
        micro_batches=micro_batches,
        measured=measured,
        priced=priced,
    )


def measured_share(once: float, twice: float, update: float) -> float:
    """The share of waiting, from the seconds of a step, of one twice as long, and of an update."""
    return 1.0 - (twice - once) / (once - update)


def _steps(shapes: list[Shape], plans: list[Plan], rounds: int) -> tuple[float, float, float] | str:
    """On a rank: median seconds of both steps, taken in turn, and of an update."""
    torch.set_num_threads(1)
    try:
        steps = [ours(shape, plan) for shape, plan in zip(shapes, plans, strict=True)]
        module = autopar.parallelize(model(shapes[0]), plans[0])
    except AutoparError as error:
        return str(error)
    seconds: list[list[float]] = [[], []]
    for number in range(WARM + rounds):
        for which, step in enumerate(steps):
            taken, _ = step_seconds(step, number)
            seconds[which] += [taken] * (number >= WARM)
    optimizer = adamw(module.parameters())
    module(*batch(shapes[0])).backward()
    updates = [
        step_seconds(lambda _: optimizer.step(), number)[0] for number in range(WARM + rounds)
    ]  # type: ignore[func-returns-value]
    dist.barrier()
    once, twice = (statistics.median(values) for values in seconds)
    return once, twice, statistics.median(updates[WARM:])
