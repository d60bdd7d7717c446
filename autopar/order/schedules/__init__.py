"""The pipeline schedules: every module of this folder but `row` holds one, as `SCHEDULE`."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Mapping

from autopar.errors import UsageError, unknown
from autopar.order.times import Times

from .row import PipelineSchedule, TorchClass

__all__ = [
    "SCHEDULES",
    "PipelineSchedule",
    "TorchClass",
    "in_flight",
    "schedule_for",
    "schedule_named",
    "step_seconds",
    "tabled",
    "thriftiest",
]


def tabled(rows: Iterable[PipelineSchedule]) -> dict[str, PipelineSchedule]:
    """Schedules by name, the oldest first; a duplicate name is an error."""
    schedules: dict[str, PipelineSchedule] = {}
    for row in sorted(rows, key=lambda row: (row.year, row.name)):
        if row.name in schedules:
            raise ValueError(f"two pipeline schedules are called {row.name!r}")
        schedules[row.name] = row
    return schedules


def _rows() -> Iterable[PipelineSchedule]:
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        if name != "row":
            yield importlib.import_module(f"{__name__}.{name}").SCHEDULE


SCHEDULES: Mapping[str, PipelineSchedule] = tabled(_rows())


def schedule_named(name: str) -> PipelineSchedule:
    """The schedule called `name`."""
    if name not in SCHEDULES:
        raise UsageError(unknown("pipeline schedule", name, SCHEDULES))
    return SCHEDULES[name]


def schedule_for(
    name: str, stages: int, micro_batches: int, interleave: int = 1
) -> PipelineSchedule:
    """The schedule called `name`, for these numbers of stages, micro-batches and chunks.

    Raises `UsageError` if it cannot run them.
    """
    row = schedule_named(name)
    reason = row.refusal(stages, micro_batches, interleave)
    if reason:
        several = [
            other.name
            for other in SCHEDULES.values()
            if not other.refusal(stages, micro_batches, interleave)
        ]
        raise UsageError(reason + (f"; possible: {', '.join(several)}" if several else ""))
    return row


def step_seconds(name: str, times: Times, micro_batches: int, interleave: int = 1) -> float:
    """Seconds of a step of the pipeline, without the optimizer; one stage waits for nobody."""
    stages = len(times.forward)
    row = schedule_for(name, stages, micro_batches, interleave)
    if stages == 1:
        return float(micro_batches * (times.forward[0] + times.backward[0]))
    return row.seconds(times, micro_batches, interleave)


@functools.cache
def in_flight(name: str, stage: int, stages: int, micro_batches: int, interleave: int = 1) -> float:
    """The most micro-batches whose activations `stage` holds at once.

    1 is a micro-batch through all of its chunks.

    >>> in_flight("1f1b", 0, 8, 64), in_flight("interleaved", 0, 8, 64, 2)
    (8.0, 11.5)
    """
    row = schedule_for(name, stages, micro_batches, interleave)
    if not 0 <= stage < stages:
        raise UsageError(f"stage {stage} of {stages} stages; they are numbered from 0")
    # This goes through every pass of a stage, and a search asks for it again and again.
    return row.alive(stage, stages, micro_batches, interleave) / interleave


def thriftiest(stages: int, micro_batches: int) -> PipelineSchedule:
    """The schedule with one chunk a stage that keeps least in flight."""
    single = (
        row
        for row in SCHEDULES.values()
        if not row.refusal(stages, micro_batches, 1) and not row.chunks
    )
    return min(
        single, key=lambda row: (in_flight(row.name, 0, stages, micro_batches), row.preferred)
    )
