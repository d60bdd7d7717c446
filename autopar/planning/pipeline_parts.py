"""Stages of a pipeline and their places: what each takes, what it hands on, and which schedules could run them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.costmodel import Cluster
from autopar.costmodel.cluster.pools import crossing, send_seconds
from autopar.order.schedules import SCHEDULES, thriftiest

from .once import Once, units_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Operators `start` to `stop` - 1: seconds of a micro-batch, of a step, and bytes at the peak of a device (see `Figures`)."""

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
    """Stages in the order of the model (with `interleave` chunks, stage k runs on devices k modulo the number of stages)."""

    stages: tuple[Stage, ...]
    schedule: str
    interleave: int
    step: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The devices of one stage: those of `cluster` from `start` on, `count` of them."""

    cluster: Cluster
    start: int
    count: int


def once_of(held: Sequence[Stage], unit_bytes: int, cluster: Cluster) -> Once:
    """What a device of a cluster that holds these chunks does once a step."""
    names = ("forward", "backward", "gather", "once", "update", "travel")
    forward, backward, gather, once, update, travel = (math.fsum(getattr(stage, name) for stage in held) for name in names)
    units = units_of(travel, unit_bytes, cluster)
    return Once(forward=forward, backward=backward, gather=gather, reduce=once - gather, update=update, units=units)


def message_seconds(places: Sequence[Place], handed: Sequence[float]) -> list[float]:
    """Seconds of handing a micro-batch's values, so many bytes, from each stage to the next; the last one's leads back to the first."""
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
    """The (schedule, interleave) pairs that exist for so many stages, micro-batches and pieces, where none is fixed."""
    for row in sorted(SCHEDULES.values(), key=lambda row: row.preferred):
        for count in (row.chunks or (1,)) if interleave is None else (interleave,):
            there = not row.refusal(stages, micro_batches, count) and (not row.chunks or stages * count <= pieces)
            if there and pipeline in (None, row.name):
                yield row.name, count


def thrifty(pipeline: str | None, stages: int, micro_batches: int) -> str:
    """The schedule with one chunk a stage that keeps least in flight: the one that is asked for, if it is such."""
    return pipeline if pipeline is not None and not SCHEDULES[pipeline].chunks else thriftiest(stages, micro_batches).name
