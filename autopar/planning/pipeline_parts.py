"""Stages of a pipeline and their places: their seconds, their messages, and their possible schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.costmodel import Cluster
from autopar.costmodel.cluster.stage_messages import crossing, send_seconds
from autopar.order.schedules import SCHEDULES, thriftiest

from .parameter_traffic import Once, units_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The operators `start` to `stop` - 1: seconds of a micro-batch and of a step, and the peak bytes of a device.

    The fields are sums of those of `OperatorCosts`.
    """

    start: int
    stop: int
    forward: float
    backward: float
    weight: float
    once: float
    gather: float
    travel: float
    update: float
    moved: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages in the order of the model; with `interleave` chunks, entry k runs on place k modulo their number."""

    stages: tuple[Stage, ...]
    schedule: str
    interleave: int
    step: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The devices of one stage: `count` devices of `cluster`, from `start` on."""

    cluster: Cluster
    start: int
    count: int


class Slower(Exception):
    """No cut takes less than a limit: `seconds` is what every cut takes at the least."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"every cut takes {seconds:.6g} s or more")
        self.seconds = seconds


def once_of(held: Sequence[Stage], unit_bytes: int, cluster: Cluster) -> Once:
    """The seconds of a device that holds these chunks, for its work once a step."""
    names = ("forward", "backward", "gather", "once", "update", "travel")
    forward, backward, gather, once, update, travel = (math.fsum(getattr(stage, name) for stage in held) for name in names)
    units = units_of(travel, unit_bytes, cluster)
    return Once(forward=forward, backward=backward, gather=gather, reduce=once - gather, update=update, units=units)


def message_seconds(places: Sequence[Place], handed: Sequence[float]) -> list[float]:
    """Seconds of sending a micro-batch's values from each stage to the next; the last stage sends to the first.

    `handed`: the bytes that each stage sends.
    """
    found = []
    for number, nbytes in enumerate(handed):
        place, following = places[number], places[(number + 1) % len(places)]
        start, stop = min(place.start, following.start), max(place.start + place.count, following.start + following.count)
        cluster, level = crossing(place.cluster, start, stop)
        found.append(float(send_seconds(cluster, nbytes, level=level)) if nbytes else 0.0)
    return found


def schedules_for(
    stages: int, micro_batches: int, *, pieces: int, pipeline: str | None = None, interleave: int | None = None
) -> Iterator[tuple[str, int]]:
    """The possible (schedule, interleave) pairs for so many stages, micro-batches and pieces, in order of preference.

    `pipeline`, `interleave`: only this schedule, or this number of chunks.
    """
    for row in sorted(SCHEDULES.values(), key=lambda row: row.preferred):
        for count in (row.chunks or (1,)) if interleave is None else (interleave,):
            there = not row.refusal(stages, micro_batches, count) and (not row.chunks or stages * count <= pieces)
            if there and pipeline in (None, row.name):
                yield row.name, count


def thrifty(pipeline: str | None, stages: int, micro_batches: int) -> str:
    """The requested schedule if it has one chunk a stage, else the one of these with fewest micro-batches in flight."""
    return pipeline if pipeline is not None and not SCHEDULES[pipeline].chunks else thriftiest(stages, micro_batches).name
