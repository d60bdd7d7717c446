"""The cuts of a model into pipeline stages, and their schedule.

For each schedule the load of the stages is evened out (`even_cuts`), and the closed form of the
schedule gives the step. An even load is not always the shortest step, because messages and updates
count as well. So the cuts of short pipelines are then shifted, piece by piece.

Stages begin where layers begin, which other runtimes can be told and people expect, unless other
cuts make a step shorter by `INSIDE`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autopar.costmodel.step.shared_cores import shared_seconds
from autopar.order.schedules import in_flight, step_seconds
from autopar.order.times import Times
from autopar.planning.tables.parameters.traffic import once_seconds
from autopar.sharding.schedule import UNIT_BYTES

from .even_cuts import EvenCuts
from .piece_costs import PieceCosts
from .stage import Pipeline, Place, Slower, Stage, message_seconds, on_one_device, once_of

SHIFTS = 8
"""The most rounds in which every cut is shifted by a piece."""
SHORT = 16
"""The most chunks of a pipeline whose cuts are shifted."""
ROUNDED_DOWN = 1 - 1e-9
"""The factor that a shorter step stays below, against rounding."""
INSIDE = 0.03
"""The least share of the step that a cut inside a layer must save."""
MOST = 0.1
"""The most that cuts inside layers save of a step: they were up to 6 % faster."""
GAIN = 1e-3
"""The least share of the step that a later schedule must save."""


class Cutter:
    """Cuts a model into stages.

    `costs`, `places`: the costs of pieces on each stage, and its devices. `limits`, `hosts`: of
    each stage the bytes of a device, and of host memory for a device. `unit_bytes`: the size of the
    units in which parameters travel. `blocks`: the costs of pieces that are whole layers.
    """

    def __init__(
        self,
        costs: PieceCosts,
        places: Sequence[Place],
        limits: Sequence[float],
        hosts: Sequence[float],
        unit_bytes: int = UNIT_BYTES,
        blocks: PieceCosts | None = None,
    ) -> None:
        self.figures = costs.figures
        self.places = places
        self.count = costs.micro_batches
        self.unit_bytes = unit_bytes
        self.costs = costs
        self.pieces = self.costs.pieces
        self.even = EvenCuts(self.costs, limits, hosts)
        self.blocks = Cutter(blocks, places, limits, hosts, unit_bytes) if blocks else None

    def best(
        self, schedules: Iterable[tuple[str, int]], too_slow: float = math.inf
    ) -> Pipeline | None:
        """Return the fastest pipeline under one of the (schedule, interleave) pairs, or None.

        Of equally fast ones it is the first. `too_slow`: pipelines that take so many seconds are
        not cut once another fits; raises `Slower` if all take as long.
        """
        fitting: list[tuple[int, Pipeline]] = []
        least = math.inf
        tried = False
        # The pairs of the least ideal step come first, because they rule out most others uncut.
        for ideal, place, schedule in sorted(
            (self.ideal(*pair), place, pair) for place, pair in enumerate(schedules)
        ):
            # The ideal steps ascend, so no later pair is within `GAIN` of the fastest.
            if (1 - GAIN) * ideal >= least or (fitting and ideal >= too_slow):
                break
            # Where faster ones do not fit, it has to be known whether any does.
            if ideal >= too_slow and not tried:
                raise Slower(ideal)
            tried = True
            pipeline = self.cut(*schedule, too_slow=min(least, too_slow))
            if pipeline is None:
                continue
            fitting.append((place, pipeline))
            least = min(least, pipeline.step)
        near = [
            (place, pipeline) for place, pipeline in fitting if (1 - GAIN) * pipeline.step <= least
        ]
        return min(near, key=lambda placed: placed[0])[1] if near else None

    def least_memory(self, schedules: Iterable[tuple[str, int]]) -> float:
        """Return the least bytes of the fullest device over all cuts.

        Schedules of several chunks a stage count only if there are no others; their chunks count as
        if they stood one behind the other.
        """
        return min(map(self.even.least_memory, self._thrifty(schedules)), default=math.inf)

    def _thrifty(self, schedules: Iterable[tuple[str, int]]) -> list[list[float]]:
        """Return what the stages have in flight under the schedules that need least memory."""
        stages = len(self.places)
        pairs = list(schedules)
        flying = [
            tuple(in_flight(name, stage, stages, self.count, chunks) for stage in range(stages))
            for name, chunks in [pair for pair in pairs if pair[1] == 1] or pairs
        ]
        # Several schedules keep as much in flight.
        return [list(flown) for flown in dict.fromkeys(flying)]

    def lacking(self, schedules: Iterable[tuple[str, int]], step: float) -> list[tuple[str, int]]:
        """Return the schedules that might be 1 % faster than a step, but lack memory."""
        return [
            pair
            for pair in schedules
            if self.ideal(*pair) < 0.99 * step
            if self.costs.count >= len(self.places) * pair[1] and self._even_cut(*pair) is None
        ]

    def cut(self, schedule: str, interleave: int, *, too_slow: float = math.inf) -> Pipeline | None:
        """Return the best pipeline under a schedule, or None if nothing fits.

        Other cuts than between layers are not looked at where these are far from `too_slow`.
        """
        whole = self.blocks.cut(schedule, interleave) if self.blocks else None
        if whole is not None:
            least = max((1 - MOST) * whole.step, self.ideal(schedule, interleave))
            if least >= min((1 - INSIDE) * whole.step, too_slow):
                return _without(least, whole)
        even = self._even_cut(schedule, interleave)
        best = None if even is None else self._shifted(even)
        if whole is not None and (best is None or (1 - INSIDE) * whole.step <= best.step):
            return whole if best is None else _without(best.step, whole)
        return best

    def _even_cut(self, schedule: str, interleave: int) -> Pipeline | None:
        """Return the pipeline under a schedule whose load is even, or None if nothing fits."""
        stages = len(self.places)
        if self.costs.count < stages * interleave:
            return None
        flying = self._flying(schedule, interleave)
        cuts = self.even.within(flying, interleave)
        if cuts is None:
            return None
        return self._pipeline(cuts, schedule, interleave, flying)

    def _flying(self, schedule: str, interleave: int) -> list[float]:
        """Return the micro-batches that every chunk has in flight."""
        stages = len(self.places)
        return [
            in_flight(schedule, stage, stages, self.count, interleave) for stage in range(stages)
        ] * interleave

    def ideal(self, schedule: str, interleave: int) -> float:
        """Return seconds of the schedule with equal stages and free messages: a lower bound."""
        stages = len(self.places)
        kinds = dict.fromkeys(self.figures)
        # Of unlike devices every operator counts as on those that are fastest for it.
        forward, backward, weight = (
            [float(np.min([getattr(kind, name) for kind in kinds], axis=0).sum()) / stages] * stages
            for name in ("forward", "backward", "weight")
        )
        hidden = float(np.max([kind.hidden for kind in kinds], axis=0).sum()) / stages
        times = Times.of(forward, backward, weight, hidden=min(hidden, forward[0] + backward[0]))
        seconds = step_seconds(schedule, times, self.count, interleave)
        busy = self.count * (forward[0] + backward[0])
        return shared_seconds(self.places[0].cluster, seconds, [busy])

    def _shifted(self, pipeline: Pipeline) -> Pipeline:
        """Return the pipeline with its cuts shifted, one by one, while the step gets shorter.

        The cuts so far even out the load. The bytes that a cut hands on, and which stage updates
        last, may count for more.
        """
        if len(pipeline.stages) > SHORT:
            return pipeline
        best = pipeline
        flying = self._flying(pipeline.schedule, pipeline.interleave)
        # Stages name operators, cuts are numbers of pieces.
        ends = [pipeline.stages[0].start, *(stage.stop for stage in pipeline.stages)]
        cuts = tuple(int(place) for place in np.searchsorted(self.pieces, ends))
        moves = list(itertools.product(range(1, len(cuts) - 1), (-1, 1), (False, True)))
        in_vain = 0
        for place, by, far in moves * SHIFTS:
            if in_vain == len(moves):
                break
            in_vain += 1
            moved = self._moved(cuts, place, by, far=far)
            if moved is None:
                continue
            shifted = (*cuts[:place], moved, *cuts[place + 1 :])
            if not self.even.fit_together(shifted, flying):
                continue
            candidate = self._pipeline(shifted, best.schedule, best.interleave, flying)
            if candidate.step < ROUNDED_DOWN * best.step:
                best = candidate
                cuts = shifted
                in_vain = 0
        return best

    def _moved(self, cuts: tuple[int, ...], place: int, by: int, *, far: bool) -> int | None:
        """Return where a cut is one piece earlier or later; None where no such place is left.

        `far`: at the next piece instead that is handed no more bytes, such as the next layer's
        first. Between such places a step is often longer than at either.
        """
        handed = self.figures[(place - 1) % len(self.places)].handed
        most = handed[self.pieces[cuts[place]]]
        moved = cuts[place] + by
        while cuts[place - 1] < moved < cuts[place + 1]:
            if not far or handed[self.pieces[moved]] <= most:
                return moved
            moved += by
        return None

    def _pipeline(
        self, cuts: tuple[int, ...], schedule: str, interleave: int, flying: Sequence[float]
    ) -> Pipeline:
        """Return the pipeline of these cuts, with its step."""
        stages = len(self.places)
        chunks = [
            self.costs.stage(number % stages, i, j, flying[number])
            for number, (i, j) in enumerate(itertools.pairwise(cuts))
        ]
        held = [chunks[stage::stages] for stage in range(stages)]
        passes = np.array([chunk.passes for chunk in chunks])
        forward, backward, weight, hidden = passes.reshape(interleave, stages, -1).sum(axis=0).T
        send = message_seconds(self.places, self._handed(chunks))
        cluster = self.places[0].cluster
        overlap = cluster.framework.habits.overlaps_sends(interleave)
        times = Times.of(forward, backward, weight, send, hidden=hidden, overlap=overlap)
        seconds = step_seconds(schedule, times, self.count, interleave)
        once = [once_of(own, self.unit_bytes, cluster) for own in held]
        seconds += once_seconds(once, cluster.backend, interleave) + self.figures[0].call
        settled = [on_one_device(own) for own in held]
        return Pipeline(
            stages=tuple(settled[k % stages][k // stages] for k in range(len(chunks))),
            schedule=schedule,
            interleave=interleave,
            step=shared_seconds(cluster, seconds, [device.busy(self.count) for device in once]),
            memory=max(math.fsum(chunk.memory for chunk in own) for own in settled),
        )

    def _handed(self, chunks: Sequence[Stage]) -> list[float]:
        """Return the bytes that the first chunk of each stage hands on; the last one has none."""
        handed = []
        for stage, figures in enumerate(self.figures):
            is_last = stage + 1 == len(chunks)
            handed.append(0.0 if is_last else float(figures.handed[chunks[stage].stop]))
        return handed


def _without(least: float, whole: Pipeline) -> Pipeline:
    """A pipeline of whole layers, with what others of `least` seconds would save."""
    return replace(whole, inside=max(1 - least / whole.step, 0.0))
