"""Pipeline stages of a program: where to cut it, and under which schedule it runs.

With the figures of every operator, stage s of the pieces i to j - 1 takes in a step, of m micro-batches,

    cost_s[i, j] = m (forward + backward) + once + update          infinite where it does not fit (see `stage_memory`)

The cuts that make the slowest stage fastest are found by `search.stages`, for each schedule; its closed form then gives the step. How long
the slowest stage takes at the least is found first, so that only the tables of such short stages are made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.step.host_share import shared_seconds
from autopar.costmodel.step.pipeline import pipeline_seconds
from autopar.order.schedules import in_flight
from autopar.search.stages import balance, interval_sums, least_worst, partition

from ..sharding.schedule import UNIT_BYTES
from .figures import Figures
from .once import once_seconds
from .pipeline_parts import Pipeline, Place, Stage, message_seconds, once_of
from .stage_memory import Ints, StageMemory

Floats = NDArray[np.float64]
MAX_PIECES = 400
"""Pieces between which a model may be cut, at most: those are joined whose cut hands on most."""
FEW = 4
"""Pieces for each stage below which a model is cut between equal bytes, too."""
WIDE = 3.0
"""Up to this multiple of the slowest stage, chunks may take while those of a device are balanced."""
HALVINGS = 16
"""By how many the least memory of the fullest stage is found."""
SHARES = 5
"""Shares of a device that are tried as the most that one of its chunks may fill."""
ROUNDED = 1 + 1e-9
GAIN = 1e-3
"""Share of a step by which a later schedule has to be faster than one before it."""


def pieces_of(figures: Sequence[Figures], stages: int) -> NDArray[np.int64]:
    """Operators before which the model may be cut, both ends included: where fewer bytes are handed on than just before or just after.

    Where that leaves a stage few pieces to choose from, as in a chain of equally wide layers, also where the bytes stay the same.
    """
    handed = np.max([f.handed for f in figures], axis=0)
    busy = np.sum([f.forward + f.backward + f.stored for f in figures], axis=0)
    work, count = np.concatenate(([0.0], np.cumsum(busy))), len(handed) - 1
    before, here, behind = handed[:-2], handed[1:-1], handed[2:]
    low = (here <= before) & (here <= behind)
    for places in (low & ((here < before) | (here < behind)), low):
        found = np.arange(1, count)[places]
        # Cuts with no work between them are one.
        found = found[np.concatenate(([True], np.diff(work[found]) > 0.0))] if len(found) else found
        if len(found) + 1 >= FEW * stages:
            break
    if len(found) > MAX_PIECES:
        found = np.sort(found[np.argsort(handed[found], kind="stable")[:MAX_PIECES]])
    return np.concatenate(([0], found, [count]))


class Cutter:
    """Cuts a model whose stage s, on `places[s]`, has the figures `figures[s]`; `hosts`: bytes of host memory for a device of each."""

    def __init__(
        self, figures: Sequence[Figures], places: Sequence[Place], limits: Sequence[float], micro_batches: int, hosts: Sequence[float],
        unit_bytes: int = UNIT_BYTES,
    ) -> None:
        self.figures, self.places, self.limits, self.count, self.hosts = figures, places, limits, micro_batches, hosts
        self.unit_bytes = unit_bytes
        self.kinds = list({id(f): f for f in figures}.values())
        self.pieces = pieces_of(self.kinds, len(places))
        self.sums: dict[tuple[int, str], Floats] = {}
        self.memories = {id(f): StageMemory(f, self.pieces) for f in self.kinds}
        self.intervals: dict[tuple[int, int], Floats] = {}

    def best(self, schedules: Iterable[tuple[str, int]]) -> Pipeline | None:
        """The fastest pipeline under one of the (schedule, interleave) pairs, of those as fast the first; None where nothing fits.

        Those that could be fastest are cut first, so that the others mostly need not be.
        """
        found: list[tuple[int, Pipeline]] = []
        least = math.inf
        for ideal, place, schedule in sorted((self._ideal(*pair), place, pair) for place, pair in enumerate(schedules)):
            if (1 - GAIN) * ideal >= least:
                break
            if (pipeline := self.cut(*schedule)) is not None:
                found.append((place, pipeline))
                least = min(least, pipeline.step)
        return min(((place, p) for place, p in found if (1 - GAIN) * p.step <= least), default=(0, None), key=lambda one: one[0])[1]

    def least_memory(self, schedules: Iterable[tuple[str, int]]) -> float:
        """Bytes of the fullest device if the cuts are made for memory alone, under the thriftiest schedule of one chunk a stage."""
        stages, best = len(self.places), math.inf
        for name in dict.fromkeys(name for name, chunks in schedules if chunks == 1):
            flying = [in_flight(name, stage, stages, self.count, 1) for stage in range(stages)]
            whole = [self.memories[id(f)].of(flown, 0, len(self.pieces) - 1) for f, flown in zip(self.figures, flying, strict=True)]
            low, high = 0.0, max(whole)
            for _ in range(HALVINGS):
                middle = 0.5 * (low + high)
                ends = self._reaches_end(self._reach(flying, [middle] * stages, [math.inf] * stages))
                low, high = (low, middle) if ends else (middle, high)
            best = min(best, high)
        return best

    def _reaches_end(self, reach: Sequence[Ints]) -> bool:
        at = 0
        for row in reach:
            at = int(row[at])
        return at == len(self.pieces) - 1

    def could_be_faster(self, schedules: Iterable[tuple[str, int]], found: Pipeline) -> bool:
        """Whether an interleaved schedule that did not fit would be faster than what was found, by more than a hundredth."""
        return found.interleave == 1 and any(self._ideal(name, chunks) < 0.99 * found.step for name, chunks in schedules if chunks > 1)

    def _ideal(self, schedule: str, interleave: int) -> float:
        """Seconds of the schedule if all stages were alike and nothing had to be sent."""
        stages = len(self.places)
        fastest = [min(float(getattr(f, name).sum()) for f in self.figures) / stages for name in ("forward", "backward", "weight")]
        forward, backward, weight = ([seconds] * stages for seconds in fastest)
        seconds = pipeline_seconds(schedule, forward, backward, weight, 0.0, self.count, interleave)
        return shared_seconds(self.places[0].cluster, seconds, [self.count * (forward[0] + backward[0])])

    def cut(self, schedule: str, interleave: int) -> Pipeline | None:
        """The best cuts for a schedule."""
        stages = len(self.places)
        if len(self.pieces) - 1 < stages * interleave:
            return None
        flying = [in_flight(schedule, stage, stages, self.count, interleave) for stage in range(stages)] * interleave
        cuts = self._cuts_within(flying, interleave)
        return None if cuts is None else self._pipeline(cuts, schedule, interleave, flying)

    def _cuts_within(self, flying: Sequence[float], interleave: int) -> tuple[int, ...] | None:
        """The best cuts whose chunks fit their devices together: the limit is the device's, one chunk may need more of it than another.

        A chunk may fill a share of its device, from all of it down to an equal part; the largest share with which the sums fit is taken.
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
            memory = self.memories[id(self.figures[number % stages])]
            held[number % stages] += memory.of(flying[number], i, j)
            hosted[number % stages] += memory.host_of(i, j)
        return bool((held <= np.array(self.limits) * ROUNDED).all() and (hosted <= np.array(self.hosts) * ROUNDED).all())

    def _cuts(self, flying: Sequence[float], interleave: int, share: float) -> tuple[int, ...] | None:
        """The best cuts, each chunk within that share of its device."""
        stages = len(self.places)
        reach = self._reach(flying[:stages], [limit * share for limit in self.limits], [host * share for host in self.hosts])
        totals = {id(figures): np.concatenate(([0.0], np.cumsum(self._seconds(figures)))) for figures in self.kinds}
        of_stages = [totals[id(figures)] for figures in self.figures]
        worst = least_worst(of_stages * interleave, reach * interleave)
        if worst == math.inf:
            return None
        for most in (worst * (ROUNDED if interleave == 1 else WIDE), math.inf):
            longest = max(_longest(total, far, most) for total, far in zip(of_stages, reach, strict=True))
            known = [self._cost(figures, far, longest) for figures, far in zip(self.figures, reach, strict=True)] * interleave
            if (cuts := partition(known)) is not None:
                return balance(cuts, known, stages) if interleave > 1 else cuts
        return None

    def _reach(self, flying: Sequence[float], limits: Sequence[float], hosts: Sequence[float]) -> list[Ints]:
        """How far each stage reaches within these bytes of its device and its host."""
        found: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(self.places)
        for figures in self.kinds:
            mine = [stage for stage, own in enumerate(self.figures) if own is figures]
            flown, most, room = (np.array([values[stage] for stage in mine], dtype=np.float64) for values in (flying, limits, hosts))
            for stage, row in zip(mine, self.memories[id(figures)].furthest(flown, most, room), strict=True):
                found[stage] = row
        return found

    def _cost(self, figures: Figures, reach: Ints, longest: int) -> Floats:
        """Seconds of a stage for every interval of up to `longest` pieces, infinite where it does not reach so far."""
        key = (id(figures), longest)
        if key not in self.intervals:
            self.intervals[key] = interval_sums(self._seconds(figures), longest)
        stops = np.arange(len(self.pieces))
        starts = np.maximum(stops[:, None] - longest + np.arange(longest), 0)
        return np.where(reach[starts] >= stops[:, None], self.intervals[key], math.inf)

    def _of_pieces(self, figures: Figures, name: str) -> Floats:
        """The sum of a figure over the operators of each piece."""
        key = (id(figures), name)
        if key not in self.sums:
            self.sums[key] = np.add.reduceat(getattr(figures, name), self.pieces[:-1])
        return self.sums[key]

    def _seconds(self, figures: Figures) -> Floats:
        """Seconds of a step of each piece."""
        passes = self._of_pieces(figures, "forward") + self._of_pieces(figures, "backward")
        return self.count * passes + self._of_pieces(figures, "once") + self._of_pieces(figures, "update")

    def _pipeline(self, cuts: tuple[int, ...], schedule: str, interleave: int, flying: Sequence[float]) -> Pipeline:
        stages = len(self.places)
        found = []
        for number, (i, j) in enumerate(itertools.pairwise(cuts)):
            figures = self.figures[number % stages]
            names = ("forward", "backward", "weight", "once", "gather", "travel", "update", "moved")
            sums = {name: float(self._of_pieces(figures, name)[i:j].sum()) for name in names}
            memory = self.memories[id(figures)].of(flying[number], i, j)
            found.append(Stage(start=int(self.pieces[i]), stop=int(self.pieces[j]), memory=memory, **sums))
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


def _longest(total: Floats, reach: Ints, most: float) -> int:
    """The most pieces in a row that take up to `most` seconds and are within reach."""
    ends = np.minimum(np.searchsorted(total, total + most, side="right") - 1, reach)
    return max(int((ends - np.arange(len(total))).max()), 1)
