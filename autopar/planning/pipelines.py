"""Pipeline stages of a program: its cuts and its schedule.

    cost_s[i, j] = m (forward + backward) + once + update          infinite if it does not fit (see `stage_memory`)

cost_s[i, j]: seconds of stage s for the pieces i to j - 1, in a step of m micro-batches, from the figures of every
operator. For each schedule, `search.stages` finds the cuts that minimise the slowest stage; the schedule's closed form
then gives the step. The least time of the slowest stage is found first, to make tables for stages of that length only.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.step.host_share import shared_seconds
from autopar.costmodel.step.pipeline import pipeline_seconds
from autopar.order.schedules import in_flight
from autopar.search.stages import balance, interval_sums, least_worst, partition

from ..sharding.schedule import UNIT_BYTES
from .operator_costs import OperatorCosts
from .parameter_traffic import once_seconds
from .pipeline_parts import Pipeline, Place, Slower, Stage, message_seconds, once_of
from .pipeline_pieces import pieces_of
from .stage_memory import Ints, StageMemory

Floats = NDArray[np.float64]
WIDE = 3.0
"""The longest chunk, in multiples of the slowest stage, while the chunks of a device are balanced."""
NEAR = 1e-3
"""The relative precision to which the least time of the slowest stage is found first."""
SPARE = 8
"""The pieces of a stage, in multiples of an equal part, that are looked at first."""
HALVINGS = 16
"""Steps of bisection for the least memory of the fullest stage."""
SHARES = 5
"""The number of shares of a device to try as the limit of one of its chunks."""
SHIFTS, SHORT = 8, 16
"""Rounds in which every cut is shifted by a piece, and the chunks up to which this is done."""
SUMMED = ("forward", "backward", "weight", "once", "gather", "travel", "update", "moved")
"""The figures of a stage that are sums over its operators."""
ROUNDED_DOWN = 1 - 1e-9
"""Factor that a shorter step stays below, against rounding."""
ROUNDED = 1 + 1e-9
"""Factor on a limit, against rounding."""
GAIN = 1e-3
"""A later schedule must save at least this share of the step."""


class Cutter:
    """Cuts a model into stages.

    `figures`, `places`: of each stage. `limits`, `hosts`: bytes of a device, and of host memory for a device, of each
    stage. `unit_bytes`: the size of the parameters' units.
    """

    def __init__(
        self, figures: Sequence[OperatorCosts], places: Sequence[Place], limits: Sequence[float], micro_batches: int,
        hosts: Sequence[float], unit_bytes: int = UNIT_BYTES,
    ) -> None:
        self.figures, self.places, self.limits, self.count, self.hosts = figures, places, limits, micro_batches, hosts
        self.unit_bytes = unit_bytes
        self.kinds = list({id(f): f for f in figures}.values())
        self.stages_of = [(f, [stage for stage, own in enumerate(figures) if own is f]) for f in self.kinds]
        self.pieces = pieces_of(self.kinds, len(places))
        self.sums: dict[tuple[int, str], Floats] = {}
        self.memories = {id(f): StageMemory(f, self.pieces) for f in self.kinds}
        self.summed: dict[int, Floats] = {}
        self.made: dict[tuple[int, int, int, float], Stage] = {}

    def unlimited(self) -> Cutter:
        """The same without a limit of memory."""
        other = copy(self)
        other.limits, other.hosts = [math.inf] * len(self.limits), [math.inf] * len(self.hosts)
        return other

    def best(self, schedules: Iterable[tuple[str, int]], too_slow: float = math.inf) -> Pipeline | None:
        """The fastest pipeline under one of the (schedule, interleave) pairs, or None; of equally fast ones the first.

        Pairs of the least ideal step are cut first; then most others are ruled out uncut. Raises `Slower` where all take `too_slow` seconds
        or more; what does is not cut beside what fits.
        """
        found: list[tuple[int, Pipeline]] = []
        least, tried = math.inf, False
        for ideal, place, schedule in sorted((self._ideal(*pair), place, pair) for place, pair in enumerate(schedules)):
            # The ideal steps ascend, so no later pair is within `GAIN` of the fastest.
            if (1 - GAIN) * ideal >= least or (found and ideal >= too_slow):
                break
            # Where faster ones do not fit, it has to be known whether any does.
            if ideal >= too_slow and not tried:
                raise Slower(ideal)
            tried = True
            if (pipeline := self.cut(*schedule)) is not None:
                found.append((place, pipeline))
                least = min(least, pipeline.step)
        near = [(place, pipeline) for place, pipeline in found if (1 - GAIN) * pipeline.step <= least]
        best = min(near, default=(0, None), key=lambda one: one[0])[1]
        return self._shifted(best) if best is not None and len(best.stages) <= SHORT else best

    def least_memory(self, schedules: Iterable[tuple[str, int]]) -> float:
        """The least bytes of the fullest device over all cuts, under the schedules of one chunk a stage if there are any; chunks count as
        if they stood one behind the other."""
        stages, best, pairs = len(self.places), math.inf, list(schedules)
        for name, chunks in dict.fromkeys([pair for pair in pairs if pair[1] == 1] or pairs):
            flying = [in_flight(name, stage, stages, self.count, chunks) for stage in range(stages)]
            whole = [self.memories[id(f)].of(flown, 0, len(self.pieces) - 1) for f, flown in zip(self.figures, flying, strict=True)]
            low, high = 0.0, max(whole)
            for _ in range(HALVINGS):
                middle = 0.5 * (low + high)
                ends = self._reaches_end(flying, middle)
                low, high = (low, middle) if ends else (middle, high)
            best = min(best, high)
        return best

    def _reaches_end(self, flying: Sequence[float], limit: float) -> bool:
        """Whether stages that hold as many pieces as fit so many bytes reach the end of the model."""
        at = 0
        for figures, flown in zip(self.figures, flying, strict=True):
            at = self.memories[id(figures)].from_start(flown, limit, at)
        return at == len(self.pieces) - 1

    def could_be_faster(self, schedules: Iterable[tuple[str, int]], found: Pipeline) -> bool:
        """Whether an interleaved schedule that did not fit could be more than 1 % faster than the found pipeline."""
        return found.interleave == 1 and any(self._ideal(name, chunks) < 0.99 * found.step for name, chunks in schedules if chunks > 1)

    def _ideal(self, schedule: str, interleave: int) -> float:
        """Seconds of the schedule with equal stages and free messages: a lower bound."""
        stages = len(self.places)
        fastest = [min(float(getattr(f, name).sum()) for f in self.figures) / stages for name in ("forward", "backward", "weight")]
        forward, backward, weight = ([seconds] * stages for seconds in fastest)
        seconds = pipeline_seconds(schedule, forward, backward, weight, 0.0, self.count, interleave)
        return shared_seconds(self.places[0].cluster, seconds, [self.count * (forward[0] + backward[0])])

    def cut(self, schedule: str, interleave: int) -> Pipeline | None:
        """The best pipeline under a schedule; None if nothing fits."""
        stages = len(self.places)
        if len(self.pieces) - 1 < stages * interleave:
            return None
        flying = [in_flight(schedule, stage, stages, self.count, interleave) for stage in range(stages)] * interleave
        cuts = self._cuts_within(flying, interleave)
        if cuts is None:
            return None
        found = self._pipeline(cuts, schedule, interleave, flying)
        # With few micro-batches stages mostly wait for one another, and an even load counts for little.
        return self._shifted(found) if self.count <= stages and len(found.stages) <= SHORT else found

    def _shifted(self, found: Pipeline) -> Pipeline:
        """The pipeline with its cuts shifted, one by one, while the step gets shorter.

        The bytes that a cut hands on, and which stage updates last, may count for more than an even load.
        """
        stages = len(self.places)
        flying = [in_flight(found.schedule, stage, stages, self.count, found.interleave) for stage in range(stages)] * found.interleave
        ends = [found.stages[0].start, *(stage.stop for stage in found.stages)]
        cuts = tuple(int(place) for place in np.searchsorted(self.pieces, ends))
        for _ in range(SHIFTS):
            before = found
            for place, by in itertools.product(range(1, len(cuts) - 1), (-1, 1)):
                other = (*cuts[:place], cuts[place] + by, *cuts[place + 1 :])
                if other[place - 1] < other[place] < other[place + 1] and self._fit_together(other, flying):
                    pipeline = self._pipeline(other, found.schedule, found.interleave, flying)
                    found, cuts = (pipeline, other) if pipeline.step < ROUNDED_DOWN * found.step else (found, cuts)
            if found is before:
                break
        return found

    def _cuts_within(self, flying: Sequence[float], interleave: int) -> tuple[int, ...] | None:
        """The best cuts with which the chunks of every device fit together.

        Each chunk may fill a share of its device, tried from all of it down to an equal part. The largest share with
        which all sums fit is taken, because one chunk may need more than another.
        """
        for share in np.geomspace(1.0, 1.0 / interleave, SHARES) if interleave > 1 else (1.0,):
            cuts = self._cuts(flying, interleave, float(share))
            if cuts is not None and self._fit_together(cuts, flying):
                return cuts
        return None

    def _fit_together(self, cuts: tuple[int, ...], flying: Sequence[float]) -> bool:
        """Whether the chunks of every device fit it, and its host."""
        stages = len(self.places)
        held, hosted = np.zeros(stages), np.zeros(stages)
        for number, (i, j) in enumerate(itertools.pairwise(cuts)):
            figures = self.figures[number % stages]
            held[number % stages] += self._stage(figures, i, j, flying[number]).memory
            hosted[number % stages] += self.memories[id(figures)].host_of(i, j)
        return bool((held <= np.array(self.limits) * ROUNDED).all() and (hosted <= np.array(self.hosts) * ROUNDED).all())

    def _cuts(self, flying: Sequence[float], interleave: int, share: float) -> tuple[int, ...] | None:
        """The best cuts with each chunk within `share` of its device."""
        stages, factor = len(self.places), ROUNDED if interleave == 1 else WIDE
        limits, hosts = [limit * share for limit in self.limits], [host * share for host in self.hosts]
        # Stages that last no longer than they need to are mostly short, and it takes less time to look at no others.
        short = (1 << (SPARE * len(self.pieces) // (stages * interleave)).bit_length()) - 1
        for most_pieces in (short, None) if short < len(self.pieces) - 1 else (None,):
            reach = self._reach(flying[:stages], limits, hosts, most_pieces)
            worst = least_worst(self._totals * interleave, reach * interleave, exact=NEAR)
            if worst < math.inf and (most_pieces is None or max(_longest(total, worst * factor) for total in self._totals) <= most_pieces):
                break
        if worst == math.inf:
            return None
        # Tables of short intervals first; whole ones only if these leave no cuts.
        for most in (worst * factor, math.inf):
            if most == math.inf and most_pieces is not None:
                reach = self._reach(flying[:stages], limits, hosts)
            longest = max(_longest(total, most, far) for total, far in zip(self._totals, reach, strict=True))
            known = self._costs(reach, longest) * interleave
            if (cuts := partition(known)) is not None:
                return balance(cuts, known, stages) if interleave > 1 else cuts
        return None

    @functools.cached_property
    def _totals(self) -> list[Floats]:
        """Of each stage, the seconds of all pieces before each one."""
        totals = {id(figures): np.concatenate(([0.0], np.cumsum(self._seconds(figures)))) for figures in self.kinds}
        return [totals[id(figures)] for figures in self.figures]

    def _reach(
        self, flying: Sequence[float], limits: Sequence[float], hosts: Sequence[float], most_pieces: int | None = None
    ) -> list[Ints]:
        """The furthest end of each stage, from each piece on, within these bytes of its device and its host."""
        found: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(self.places)
        for figures, mine in self.stages_of:
            flown, most, room = (np.array([values[stage] for stage in mine], dtype=np.float64) for values in (flying, limits, hosts))
            for stage, row in zip(mine, self.memories[id(figures)].furthest(flown, most, room, most_pieces), strict=True):
                found[stage] = row
        return found

    def _costs(self, reach: Sequence[Ints], longest: int) -> list[Floats]:
        """Of each stage, the seconds for every interval of up to `longest` pieces, infinite beyond its `reach`."""
        stops = np.arange(len(self.pieces))
        starts = np.maximum(stops[:, None] - longest + np.arange(longest), 0)
        found: list[Floats] = [np.zeros(0)] * len(self.places)
        for figures, mine in self.stages_of:
            whole = interval_sums(self._seconds(figures), longest)
            for stage in mine:
                within = reach[stage][starts] >= stops[:, None]
                found[stage] = whole if within.all() else np.where(within, whole, math.inf)
        return found

    def _of_pieces(self, figures: OperatorCosts, name: str) -> Floats:
        """The sum of a figure over the operators of each piece."""
        if (key := (id(figures), name)) not in self.sums:
            self.sums[key] = np.add.reduceat(getattr(figures, name), self.pieces[:-1])
        return self.sums[key]

    def _seconds(self, figures: OperatorCosts) -> Floats:
        """Seconds of a step of each piece."""
        passes = self._of_pieces(figures, "forward") + self._of_pieces(figures, "backward")
        return self.count * passes + self._of_pieces(figures, "once") + self._of_pieces(figures, "update")

    def _stage(self, figures: OperatorCosts, i: int, j: int, flying: float) -> Stage:
        """A stage of the pieces i to j - 1. It is kept: a shifted cut changes only two."""
        key = (id(figures), i, j, flying)
        if (stage := self.made.get(key)) is None:
            if id(figures) not in self.summed:
                self.summed[id(figures)] = np.array([self._of_pieces(figures, name) for name in SUMMED])
            sums = dict(zip(SUMMED, self.summed[id(figures)][:, i:j].sum(axis=1).tolist(), strict=True))
            memory = self.memories[id(figures)].of(flying, i, j)
            self.made[key] = stage = Stage(start=int(self.pieces[i]), stop=int(self.pieces[j]), memory=memory, **sums)
        return stage

    def _pipeline(self, cuts: tuple[int, ...], schedule: str, interleave: int, flying: Sequence[float]) -> Pipeline:
        stages = len(self.places)
        found = [
            self._stage(self.figures[number % stages], i, j, flying[number]) for number, (i, j) in enumerate(itertools.pairwise(cuts))
        ]
        held = [found[stage::stages] for stage in range(stages)]
        forward, backward, weight = (
            [math.fsum(getattr(s, name) for s in group) for group in held] for name in ("forward", "backward", "weight")
        )
        handed = [float(self.figures[n].handed[found[n].stop]) if n + 1 < len(found) else 0.0 for n in range(stages)]
        send = message_seconds(self.places, handed)
        seconds = pipeline_seconds(schedule, forward, backward, weight, send, self.count, interleave)
        cluster = self.places[0].cluster
        once = [once_of(group, self.unit_bytes, cluster) for group in held]
        seconds += once_seconds(once, cluster.backend, interleave)
        step = shared_seconds(cluster, seconds, [one.busy(self.count) for one in once])
        memory = max(math.fsum(s.memory for s in group) for group in held)
        return Pipeline(stages=tuple(found), schedule=schedule, interleave=interleave, step=step, memory=memory)


def _longest(total: Floats, most: float, reach: Ints | None = None) -> int:
    """The most consecutive pieces that take up to `most` seconds and are within `reach`."""
    ends = np.searchsorted(total, total + most, side="right") - 1
    ends = ends if reach is None else np.minimum(ends, reach)
    return max(int((ends - np.arange(len(total))).max()), 1)
