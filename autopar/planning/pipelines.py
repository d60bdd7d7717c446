"""Pipeline stages of a program: where to cut it, and under which schedule it runs.

With the figures of every operator, stage s of the pieces i to j - 1 takes in a step, of m micro-batches,

    cost_s[i, j] = m (forward + backward) + once + update          infinite where it does not fit:
    memory_s[i, j] = stored + (in_flight_s - 1) saved + max over its operators k of (saved up to k + excess_k)

The cuts that make the slowest stage fastest are found by `search.stages`, for each schedule; its closed form then gives the step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel import Cluster
from autopar.costmodel.pipeline import SCHEDULES, in_flight, pipeline_seconds
from autopar.costmodel.pools import crossing, send_seconds
from autopar.search.stages import interval_sums, partition

from .figures import Figures

Floats = NDArray[np.float64]
MAX_PIECES = 400
"""Pieces between which a model may be cut, at most: those are joined whose cut hands on most."""
INTERLEAVES = (2, 3, 4, 6, 8)
PREFERRED = ("1f1b", "interleaved", "zero_bubble", "gpipe")
"""Schedules in the order in which they are taken where they are equally fast."""
GAIN = 1e-3
"""Share of a step by which a later schedule has to be faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Operators `start` to `stop` - 1: seconds of a micro-batch, of a step, and bytes at the peak of a device."""

    start: int
    stop: int
    forward: float
    backward: float
    weight: float
    once: float
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


def pieces_of(figures: Sequence[Figures]) -> NDArray[np.int64]:
    """Operators before which the model may be cut: where fewer bytes are handed on than just before and after, both ends included."""
    handed = np.max([f.handed for f in figures], axis=0)
    busy = np.sum([f.forward + f.backward + f.stored for f in figures], axis=0)
    count = len(handed) - 1
    inner = np.arange(1, count)
    low = (handed[inner] <= handed[inner - 1]) & (handed[inner] < handed[np.minimum(inner + 1, count)])
    found = inner[low | ((handed[inner] < handed[inner - 1]) & (handed[inner] <= handed[inner + 1]))]
    # Cuts with no work between them are one.
    work = np.concatenate(([0.0], np.cumsum(busy)))[found]
    found = found[np.concatenate(([True], np.diff(work) > 0.0))] if len(found) else found
    if len(found) > MAX_PIECES:
        found = np.sort(found[np.argsort(handed[found], kind="stable")[:MAX_PIECES]])
    return np.concatenate(([0], found, [count]))


class Cutter:
    """Cuts a model whose stage s, on `places[s]`, has the figures `figures[s]`."""

    def __init__(self, figures: Sequence[Figures], places: Sequence[Place], limits: Sequence[float], micro_batches: int) -> None:
        self.figures, self.places, self.limits, self.count = figures, places, limits, micro_batches
        self.pieces = pieces_of(list({id(f): f for f in figures}.values()))
        self.sums: dict[int, dict[str, Floats]] = {}

    def best(self, schedules: Iterable[tuple[str, int]]) -> Pipeline | None:
        """The fastest pipeline under one of the (schedule, interleave) pairs; None where nothing fits."""
        best: Pipeline | None = None
        for name, interleave in schedules:
            if best is not None and self._ideal(name, interleave) >= (1 - GAIN) * best.step:
                continue
            found = self.cut(name, interleave)
            if found is not None and (best is None or found.step < (1 - GAIN) * best.step):
                best = found
        return best

    def could_be_faster(self, schedules: Iterable[tuple[str, int]], found: Pipeline) -> bool:
        """Whether an interleaved schedule that did not fit would be faster than what was found, by more than a hundredth."""
        return found.interleave == 1 and any(self._ideal(name, chunks) < 0.99 * found.step for name, chunks in schedules if chunks > 1)

    def _ideal(self, schedule: str, interleave: int) -> float:
        """Seconds of the schedule if all stages were alike and nothing had to be sent."""
        stages = len(self.places)
        fastest = [min(float(getattr(f, name).sum()) for f in self.figures) / stages for name in ("forward", "backward", "weight")]
        forward, backward, weight = ([seconds] * stages for seconds in fastest)
        return pipeline_seconds(schedule, forward, backward, weight, 0.0, self.count, interleave)

    def cut(self, schedule: str, interleave: int) -> Pipeline | None:
        """The best cuts for a schedule."""
        stages = len(self.places)
        if len(self.pieces) - 1 < stages * interleave:
            return None
        flying = [in_flight(schedule, stage, stages, self.count, interleave) for stage in range(stages)] * interleave
        order = [chunk % stages for chunk in range(stages * interleave)]
        known = [self._cost(stage, flying[stage], interleave) for stage in range(stages)]
        costs = [known[stage] for stage in order]
        cuts = partition(costs)
        return None if cuts is None else self._pipeline(cuts, schedule, interleave, flying)

    def _sum(self, figures: Figures, name: str) -> Floats:
        known = self.sums.setdefault(id(figures), {})
        if name not in known:
            fill = 0.0 if name in ("stored", "saved") else math.inf
            known[name] = interval_sums(np.add.reduceat(getattr(figures, name), self.pieces[:-1]), fill)
        return known[name]

    def _memory(self, figures: Figures, flying: float) -> Floats:
        """Bytes of a stage for every interval of pieces."""
        known = self.sums.setdefault(id(figures), {})
        if "peak" not in known:
            # saved up to an operator, plus what is alive beside it: the greatest of an interval, less what was saved before it
            above = np.cumsum(figures.saved) + figures.excess
            highest = np.maximum.reduceat(above, self.pieces[:-1])
            before = np.concatenate(([0.0], np.cumsum(figures.saved)))[self.pieces]
            count = len(highest)
            peak = np.zeros((count + 1, count + 1))
            for start in range(count):
                peak[start, start + 1 :] = np.maximum.accumulate(highest[start:]) - before[start]
            known["peak"] = peak
        return self._sum(figures, "stored") + (flying - 1) * self._sum(figures, "saved") + known["peak"]

    def _cost(self, stage: int, flying: float, interleave: int) -> Floats:
        figures = self.figures[stage]
        passes = self._sum(figures, "forward") + self._sum(figures, "backward")
        seconds = self.count * passes + self._sum(figures, "once") + self._sum(figures, "update")
        fits = self._memory(figures, flying) * interleave <= self.limits[stage]
        return np.where(fits, seconds, math.inf)

    def _pipeline(self, cuts: tuple[int, ...], schedule: str, interleave: int, flying: Sequence[float]) -> Pipeline:
        stages = len(self.places)
        found = []
        for number, (i, j) in enumerate(itertools.pairwise(cuts)):
            figures = self.figures[number % stages]
            sums = {name: float(self._sum(figures, name)[i, j]) for name in ("forward", "backward", "weight", "once", "update", "moved")}
            memory = float(self._memory(figures, flying[number])[i, j])
            found.append(Stage(start=int(self.pieces[i]), stop=int(self.pieces[j]), memory=memory, **sums))
        held = [found[stage::stages] for stage in range(stages)]
        forward, backward, weight = (
            [math.fsum(getattr(s, name) for s in group) for group in held] for name in ("forward", "backward", "weight")
        )
        seconds = pipeline_seconds(schedule, forward, backward, weight, self._sends(found), self.count, interleave)
        after = max(
            max(math.fsum(s.once for s in group) - back, 0.0) + math.fsum(s.update for s in group)
            for group, back in zip(held, backward, strict=True)
        )
        memory = max(math.fsum(s.memory for s in group) for group in held)
        return Pipeline(stages=tuple(found), schedule=schedule, interleave=interleave, step=seconds + after, memory=memory)

    def _sends(self, stages: Sequence[Stage]) -> list[float]:
        """Seconds of handing a micro-batch's values from each stage to the next; the last one's leads back to the first."""
        count = len(self.places)
        found = []
        for number in range(count):
            place, following = self.places[number], self.places[(number + 1) % count]
            behind = stages[number].stop
            nbytes = float(self.figures[number].handed[behind]) if number + 1 < len(stages) else 0.0
            start, stop = min(place.start, following.start), max(place.start + place.count, following.start + following.count)
            cluster, level = crossing(place.cluster, start, stop)
            found.append(float(send_seconds(cluster, nbytes, level=level)) if nbytes else 0.0)
        return found


def schedules_for(
    stages: int, micro_batches: int, *, pieces: int, pipeline: str | None = None, interleave: int | None = None
) -> Iterator[tuple[str, int]]:
    """The (schedule, interleave) pairs that exist for so many stages, micro-batches and pieces, where none is fixed."""
    for name in PREFERRED if pipeline is None else (pipeline,):
        chunks: Sequence[int] = (1,)
        if SCHEDULES[name].chunks:
            chunks = INTERLEAVES if interleave is None else (interleave,)
        elif interleave not in (None, 1):
            continue
        for count in chunks:
            if count == 1 or (micro_batches % stages == 0 and stages * count <= pieces):
                yield name, count
