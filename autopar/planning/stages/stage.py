"""Stages of a pipeline and their places, with the seconds of their messages."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.costmodel.cluster.stage_messages import crossing, send_seconds
from autopar.planning.tables.parameters.traffic import Once, units_once


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The operators `start` to `stop` - 1 on the devices of one place.

    The seconds and bytes are sums of those of `OperatorCosts`; `memory`: the peak bytes of a
    device, of which `working` are there only while a pass of the stage runs.
    """

    start: int
    stop: int
    forward: float
    backward: float
    weight: float
    hidden: float
    once: float
    gather: float
    travel: float
    update: float
    moved: float
    memory: float
    working: float

    @property
    def passes(self) -> tuple[float, float, float, float]:
        """Return the seconds of a micro-batch: of both passes, and the parts of them."""
        return self.forward, self.backward, self.weight, self.hidden


def on_one_device(chunks: Sequence[Stage]) -> list[Stage]:
    """Chunks of one device, of which one is at work at a time: that which needs most for it."""
    most = max(chunks, key=lambda chunk: chunk.working)
    return [
        chunk if chunk is most else replace(chunk, memory=chunk.memory - chunk.working)
        for chunk in chunks
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages in the order of the model, with their schedule, step and peak memory.

    With `interleave` chunks a device, entry k runs on place k modulo the number of places.
    `inside`: the share of the step that cuts inside layers save at most, where none was made.
    """

    stages: tuple[Stage, ...]
    schedule: str
    interleave: int
    step: float
    memory: float
    inside: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The devices of one stage: `count` devices of `cluster`, from `start` on."""

    cluster: Cluster
    start: int
    count: int


class Slower(Exception):
    """Every cut takes at least `seconds`, which is more than was allowed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"every cut takes {seconds:.6g} s or more")
        self.seconds = seconds


def once_of(held: Sequence[Stage], unit_bytes: int, cluster: Cluster) -> Once:
    """Return the seconds of a device that holds these chunks, for its work once a step."""
    gather = math.fsum(stage.gather for stage in held)
    travel = math.fsum(stage.travel for stage in held)
    gathered_in, reduced_in = units_once(travel, unit_bytes, cluster)
    return Once(
        forward=math.fsum(stage.forward for stage in held),
        backward=math.fsum(stage.backward for stage in held),
        gather=gather,
        reduce=math.fsum(stage.once for stage in held) - gather,
        update=math.fsum(stage.update for stage in held),
        gathered_in=gathered_in,
        reduced_in=reduced_in,
    )


def message_seconds(places: Sequence[Place], handed: Sequence[float]) -> list[float]:
    """Return the seconds of sending a micro-batch's values from each stage to the next.

    `handed`: the bytes that each stage sends. The last stage sends to the first, where the next
    chunk is.
    """
    following = [*places[1:], places[0]]
    return [
        _sent(place, other, nbytes) if nbytes else 0.0
        for place, other, nbytes in zip(places, following, handed, strict=True)
    ]


# Each shift of a cut asks again for the messages of all the cuts that stay.
@functools.lru_cache(maxsize=65536)
def _sent(place: Place, following: Place, nbytes: float) -> float:
    """Return the seconds of a message from one place to another, with the host's at both ends."""
    start = min(place.start, following.start)
    stop = max(place.start + place.count, following.start + following.count)
    cluster, level = crossing(place.cluster, start, stop)
    issued = place.cluster.host_seconds("message")
    return issued + float(send_seconds(cluster, nbytes, level=level))
