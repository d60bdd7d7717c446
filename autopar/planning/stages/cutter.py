"""The cuts of a model into pipeline stages, and their schedule.

    cost_s[i, j] = m (forward + backward) + once + update      infinite if it does not fit

cost_s[i, j] is the seconds of stage s for the pieces i to j - 1, in a step of m micro-batches (see
`piece_costs`, and `stage_memory` for what fits). For each schedule, `autopar.search` finds the cuts
that minimise the slowest stage. The closed form of the schedule then gives the step.

The least time of the slowest stage is found first, because tables are then needed only for stages
that take no longer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np

from autopar.costmodel.step.shared_cores import shared_seconds
from autopar.order.schedules import in_flight, step_seconds
from autopar.order.times import Times
from autopar.planning.tables.parameters.traffic import once_seconds
from autopar.search import balance, least_worst, partition
from autopar.sharding.schedule import UNIT_BYTES

from .operator_costs import OperatorCosts
from .piece_costs import Floats, PieceCosts
from .stage import Pipeline, Place, Slower, Stage, message_seconds, once_of
from .stage_memory import Ints

WIDE = 3.0
"""The longest chunk, in multiples of the slowest stage, while a device's chunks are balanced."""
NEAR = 1e-3
"""The relative precision to which the least time of the slowest stage is found first."""
SPARE = 8
"""The pieces of a stage, in multiples of an equal part, that are looked at first."""
HALVINGS = 16
"""Steps of bisection for the least memory of the fullest stage."""
SHARES = 5
"""The number of shares of a device to try as the limit of one of its chunks."""
SHIFTS = 8
"""The most rounds in which every cut is shifted by a piece."""
SHORT = 16
"""The most chunks of a pipeline whose cuts are shifted."""
SHIFTED = 1.25
"""How far behind the fastest a pipeline may be for its cuts to be shifted: that gains up to 14 %.
"""
ROUNDED_DOWN = 1 - 1e-9
"""The factor that a shorter step stays below, against rounding."""
ROUNDED = 1 + 1e-9
"""The factor on a limit, against rounding."""
GAIN = 1e-3
"""The least share of the step that a later schedule must save."""


class Cutter:
    """Cuts a model into stages.

    `figures`, `places`: the operators' costs on each stage, and its devices. `limits`, `hosts`: of
    each stage the bytes of a device, and of host memory for a device. `unit_bytes`: the size of the
    units in which parameters travel.
    """

    def __init__(
        self,
        figures: Sequence[OperatorCosts],
        places: Sequence[Place],
        limits: Sequence[float],
        micro_batches: int,
        hosts: Sequence[float],
        unit_bytes: int = UNIT_BYTES,
    ) -> None:
        self.figures = figures
        self.places = places
        self.limits = limits
        self.count = micro_batches
        self.hosts = hosts
        self.unit_bytes = unit_bytes
        self.costs = PieceCosts(figures, micro_batches)
        self.pieces = self.costs.pieces

    def unlimited(self) -> Cutter:
        """Return a cutter of the same model without a limit of memory."""
        # The costs of pieces are the same, and stay shared.
        cutter = copy(self)
        cutter.limits = [math.inf] * len(self.limits)
        cutter.hosts = [math.inf] * len(self.hosts)
        return cutter

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
            pipeline = self.cut(*schedule)
            if pipeline is None:
                continue
            # One that is far behind before its cuts are shifted is so afterwards, too.
            if pipeline.step < SHIFTED * min(least, too_slow):
                pipeline = self._shifted(pipeline)
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
        stages = len(self.places)
        best = math.inf
        pairs = list(schedules)
        for name, chunks in dict.fromkeys([pair for pair in pairs if pair[1] == 1] or pairs):
            flying = [in_flight(name, stage, stages, self.count, chunks) for stage in range(stages)]
            low = 0.0
            high = max(
                self.costs.memory(stage).of(flown, 0, self.costs.count)
                for stage, flown in enumerate(flying)
            )
            for _ in range(HALVINGS):
                middle = 0.5 * (low + high)
                if self._reaches_end(flying, middle):
                    high = middle
                else:
                    low = middle
            best = min(best, high)
        return best

    def could_be_faster(self, schedules: Iterable[tuple[str, int]], pipeline: Pipeline) -> bool:
        """Return whether an interleaved schedule that did not fit may be 1 % faster."""
        return pipeline.interleave == 1 and any(
            self.ideal(name, chunks) < 0.99 * pipeline.step
            for name, chunks in schedules
            if chunks > 1
        )

    def cut(self, schedule: str, interleave: int) -> Pipeline | None:
        """Return the best pipeline under a schedule, or None if nothing fits."""
        stages = len(self.places)
        if self.costs.count < stages * interleave:
            return None
        flying = self._flying(schedule, interleave)
        cuts = self._cuts_within(flying, interleave)
        if cuts is None:
            return None
        return self._pipeline(cuts, schedule, interleave, flying)

    def _flying(self, schedule: str, interleave: int) -> list[float]:
        """Return the micro-batches that every chunk has in flight."""
        stages = len(self.places)
        return [
            in_flight(schedule, stage, stages, self.count, interleave) for stage in range(stages)
        ] * interleave

    def _reaches_end(self, flying: Sequence[float], limit: float) -> bool:
        """Return whether stages of at most so many bytes can hold the whole model."""
        end = 0
        # Each stage holds as many pieces as it can: that leaves least for those behind it.
        for stage, flown in enumerate(flying):
            end = self.costs.memory(stage).from_start(flown, limit, end)
        return end == self.costs.count

    def ideal(self, schedule: str, interleave: int) -> float:
        """Return seconds of the schedule with equal stages and free messages: a lower bound."""
        stages = len(self.places)
        forward, backward, weight = (
            [min(float(getattr(figures, name).sum()) for figures in self.figures) / stages] * stages
            for name in ("forward", "backward", "weight")
        )
        seconds = step_seconds(
            schedule, Times.of(forward, backward, weight), self.count, interleave
        )
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
        # Stages tell operators; the cuts are numbers of pieces.
        ends = [pipeline.stages[0].start, *(stage.stop for stage in pipeline.stages)]
        cuts = tuple(int(place) for place in np.searchsorted(self.pieces, ends))
        for _ in range(SHIFTS):
            before = best
            # Each cut is tried one piece earlier and one piece later.
            for place, by in itertools.product(range(1, len(cuts) - 1), (-1, 1)):
                moved = cuts[place] + by
                if not cuts[place - 1] < moved < cuts[place + 1]:
                    continue
                shifted = (*cuts[:place], moved, *cuts[place + 1 :])
                if not self._fit_together(shifted, flying):
                    continue
                candidate = self._pipeline(shifted, best.schedule, best.interleave, flying)
                if candidate.step < ROUNDED_DOWN * best.step:
                    best = candidate
                    cuts = shifted
            if best is before:
                break
        return best

    def _cuts_within(self, flying: Sequence[float], interleave: int) -> tuple[int, ...] | None:
        """Return the best cuts with which the chunks of every device fit together.

        One chunk may need more than another. So each may fill a share of its device, tried from all
        of it down to an equal part; the largest share with which all sums fit is taken.
        """
        for share in np.geomspace(1.0, 1.0 / interleave, SHARES) if interleave > 1 else (1.0,):
            cuts = self._cuts(flying, interleave, float(share))
            if cuts is not None and self._fit_together(cuts, flying):
                return cuts
        return None

    def _fit_together(self, cuts: tuple[int, ...], flying: Sequence[float]) -> bool:
        """Return whether the chunks of every device fit it, and its host."""
        stages = len(self.places)
        held = [0.0] * stages
        hosted = [0.0] * stages
        for chunk, (i, j) in enumerate(itertools.pairwise(cuts)):
            stage = chunk % stages
            held[stage] += self.costs.stage(stage, i, j, flying[chunk]).memory
            hosted[stage] += self.costs.memory(stage).host_of(i, j)
        return all(
            used <= limit * ROUNDED
            for used, limit in zip((*held, *hosted), (*self.limits, *self.hosts), strict=True)
        )

    def _cuts(
        self, flying: Sequence[float], interleave: int, share: float
    ) -> tuple[int, ...] | None:
        """Return the best cuts with each chunk within `share` of its device, or None."""
        stages = len(self.places)
        factor = ROUNDED if interleave == 1 else WIDE
        limits = [limit * share for limit in self.limits]
        hosts = [host * share for host in self.hosts]
        flown = flying[:stages]
        # Most stages are short, so it takes less time to look at short ones alone first.
        short = (1 << (SPARE * len(self.pieces) // (stages * interleave)).bit_length()) - 1
        lengths: tuple[int | None, ...] = (None,)
        if short < self.costs.count:
            lengths = (short, None)
        for most_pieces in lengths:
            reach = self.costs.reach(flown, limits, hosts, most_pieces)
            worst = least_worst(self.costs.totals * interleave, reach * interleave, exact=NEAR)
            if worst < math.inf and (
                most_pieces is None
                or max(_longest(total, worst * factor) for total in self.costs.totals)
                <= most_pieces
            ):
                break
        if worst == math.inf:
            return None
        # Tables of short intervals come first; whole ones are made only if these leave no cuts.
        for most in (worst * factor, math.inf):
            if most == math.inf and most_pieces is not None:
                reach = self.costs.reach(flown, limits, hosts)
            longest = max(
                _longest(total, most, far)
                for total, far in zip(self.costs.totals, reach, strict=True)
            )
            costs = self.costs.costs(reach, longest) * interleave
            cuts = partition(costs)
            if cuts is not None:
                return balance(cuts, costs, stages) if interleave > 1 else cuts
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
        forward, backward, weight = (
            [math.fsum(getattr(chunk, name) for chunk in own) for own in held]
            for name in ("forward", "backward", "weight")
        )
        send = message_seconds(self.places, self._handed(chunks))
        times = Times.of(forward, backward, weight, send)
        seconds = step_seconds(schedule, times, self.count, interleave)
        cluster = self.places[0].cluster
        once = [once_of(own, self.unit_bytes, cluster) for own in held]
        seconds += once_seconds(once, cluster.backend, interleave)
        return Pipeline(
            stages=tuple(chunks),
            schedule=schedule,
            interleave=interleave,
            step=shared_seconds(cluster, seconds, [device.busy(self.count) for device in once]),
            memory=max(math.fsum(chunk.memory for chunk in own) for own in held),
        )

    def _handed(self, chunks: Sequence[Stage]) -> list[float]:
        """Return the bytes that the first chunk of each stage hands on; the model's end none."""
        handed = []
        for stage, figures in enumerate(self.figures):
            is_last = stage + 1 == len(chunks)
            handed.append(0.0 if is_last else float(figures.handed[chunks[stage].stop]))
        return handed


def _longest(total: Floats, most: float, reach: Ints | None = None) -> int:
    """Return the most consecutive pieces that take up to `most` seconds and are within `reach`."""
    ends = np.searchsorted(total, total + most, side="right") - 1
    if reach is not None:
        ends = np.minimum(ends, reach)
    return max(int((ends - np.arange(len(total))).max()), 1)
