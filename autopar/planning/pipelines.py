"""Pipeline stages of a program: where to cut it, and under which schedule it runs.

With the figures of every operator, stage s of the pieces i to j - 1 takes in a step, of m micro-batches,

    cost_s[i, j] = m (forward + backward) + once + update          infinite where it does not fit:
    memory_s[i, j] = stored + max( (in_flight_s - 1) saved + max over its operators k of (saved up to k + excess_k),
                                   max over k of (saved up to k + excess_k + flat behind k) )

The cuts that make the slowest stage fastest are found by `search.stages`, for each schedule; its closed form then gives the step. Stages
that take much longer than the mean are not looked at, unless no others fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.step.pipeline import pipeline_seconds
from autopar.order.schedules import in_flight
from autopar.search.stages import balance, interval_sums, partition

from ..sharding.schedule import UNIT_BYTES
from .figures import Figures
from .once import once_seconds
from .pipeline_parts import Pipeline, Place, Stage, message_seconds, once_of

Floats = NDArray[np.float64]
MAX_PIECES = 400
"""Pieces between which a model may be cut, at most: those are joined whose cut hands on most."""
FEW = 4
"""Pieces for each stage below which a model is cut between equal bytes, too."""
WIDE = 3.0
"""Stages are looked at that take up to this multiple of the mean stage, or of the longest piece; then, up to multiples of it."""
SHARES = 5
"""Shares of a device that are tried as the most that one of its chunks may fill."""
ROUNDED = 1 + 1e-9
GAIN = 1e-3
"""Share of a step by which a later schedule has to be faster."""


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Intervals:
    """Tables of intervals (see `search.stages`): seconds; bytes that a micro-batch keeps, at the peak of one and of the last one, and in
    host memory."""

    seconds: Floats
    saved: Floats
    peak: Floats
    last: Floats
    host: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Peaks:
    """Of every piece the most that is saved up to an operator and alive beside it, the same less the flat copies of the gradients up to it;
    what is saved, and flat, before every cut."""

    highest: Floats
    highest_last: Floats
    saved: Floats
    flat: Floats


def _longest(seconds: Floats, allowed: float) -> int:
    """The most pieces in a row that take up to `allowed` seconds."""
    total = np.concatenate(([0.0], np.cumsum(seconds)))
    stops = np.searchsorted(total, total + allowed, side="right") - 1
    return max(int((stops - np.arange(len(total))).max()), 1)


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
        self.peaks: dict[int, _Peaks] = {}
        self.tables: dict[tuple[int, int], _Intervals] = {}

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

    def least_memory(self, schedules: Iterable[tuple[str, int]]) -> float:
        """Bytes of the fullest device if the cuts are made for memory alone, under the thriftiest schedule of one chunk a stage."""
        stages, best = len(self.places), math.inf
        for name in dict.fromkeys(name for name, chunks in schedules if chunks == 1):
            known = [self._needed(stage, in_flight(name, stage, stages, self.count, 1), len(self.pieces) - 1) for stage in range(stages)]
            cuts = partition(known)
            if cuts is not None:
                best = min(best, max(float(table[j, i - j]) for table, (i, j) in zip(known, itertools.pairwise(cuts), strict=True)))
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
            figures = self.figures[number % stages]
            held[number % stages] += self._memory(figures, flying[number], i, j)
            hosted[number % stages] += float(self._of_pieces(figures, "host")[i:j].sum())
        return bool((held <= np.array(self.limits) * ROUNDED).all() and (hosted <= np.array(self.hosts) * ROUNDED).all())

    def _cuts(self, flying: Sequence[float], interleave: int, share: float) -> tuple[int, ...] | None:
        """The best cuts, each chunk within that share of its device, among stages of so many seconds as are sure to hold them."""
        stages = len(self.places)
        pieces = [self._seconds(figures) for figures in self.kinds]
        allowed = WIDE * max(max(float(p.max()), float(p.sum()) / (stages * interleave)) for p in pieces)
        room = max(self.limits) * share
        most = max(_longest(self._of_pieces(figures, "stored"), room) for figures in self.kinds)
        while True:
            longest = min(max(_longest(p, allowed) for p in pieces), most)
            known = [self._cost(stage, flying[stage], share, longest) for stage in range(stages)]
            cuts = partition(known * interleave)
            if cuts is not None and interleave > 1:
                cuts = balance(cuts, known * interleave, stages)
            if longest == most or (cuts is not None and max(self._spent(cuts)) <= allowed):
                return cuts
            allowed *= WIDE

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

    def _spent(self, cuts: Sequence[int]) -> Iterator[float]:
        """Seconds of the stages."""
        for number, (i, j) in enumerate(itertools.pairwise(cuts)):
            yield float(self._seconds(self.figures[number % len(self.places)])[i:j].sum())

    def _cost(self, stage: int, flying: float, share: float, longest: int) -> Floats:
        """Seconds of a stage for every interval of pieces, infinite where it needs more than a share of its device."""
        made = self._known_intervals(stage, longest)
        needed = self._needed(stage, flying, longest)
        fits = (needed <= self.limits[stage] * share) & (made.host <= self.hosts[stage] * share)
        return np.where(fits, made.seconds, math.inf)

    def _needed(self, stage: int, flying: float, longest: int) -> Floats:
        """Bytes of a stage for every interval of pieces, infinite where there is none."""
        made = self._known_intervals(stage, longest)
        needed = np.maximum(made.peak + (flying - 1) * made.saved, made.last)
        return np.where(np.isfinite(made.seconds), needed, math.inf)

    def _known_intervals(self, stage: int, longest: int) -> _Intervals:
        key = (id(self.figures[stage]), longest)
        if key not in self.tables:
            self.tables[key] = self._intervals(self.figures[stage], longest)
        return self.tables[key]

    def _intervals(self, figures: Figures, longest: int) -> _Intervals:
        made = self._peaks(figures)
        count = len(self.pieces) - 1
        peak, last = np.zeros((count + 1, longest)), np.zeros((count + 1, longest))
        most, most_last = np.full(count, -math.inf), np.full(count, -math.inf)
        for length in range(1, longest + 1):
            starts = slice(count - length + 1)
            most = np.maximum(most[starts], made.highest[length - 1 :])
            most_last = np.maximum(most_last[starts], made.highest_last[length - 1 :])
            peak[length:, longest - length] = most - made.saved[starts]
            last[length:, longest - length] = most_last - made.saved[starts] + made.flat[length:]
        saved, stored, host = (interval_sums(self._of_pieces(figures, name), longest, 0.0) for name in ("saved", "stored", "host"))
        seconds = interval_sums(self._seconds(figures), longest)
        return _Intervals(seconds=seconds, saved=saved, peak=peak + stored, last=last + stored, host=host)

    def _peaks(self, figures: Figures) -> _Peaks:
        if id(figures) not in self.peaks:
            saved, flat = np.cumsum(figures.saved), np.cumsum(figures.flat)
            alive, begins = saved + figures.excess, self.pieces[:-1]
            self.peaks[id(figures)] = _Peaks(
                highest=np.maximum.reduceat(alive, begins), highest_last=np.maximum.reduceat(alive - flat, begins),
                saved=np.concatenate(([0.0], saved))[self.pieces], flat=np.concatenate(([0.0], flat))[self.pieces],
            )  # fmt: skip
        return self.peaks[id(figures)]

    def _memory(self, figures: Figures, flying: float, i: int, j: int) -> float:
        """Bytes of a stage that holds the pieces i to j - 1."""
        made = self._peaks(figures)
        stored, saved = (float(self._of_pieces(figures, name)[i:j].sum()) for name in ("stored", "saved"))
        during, last = float(made.highest[i:j].max()), float(made.highest_last[i:j].max() + made.flat[j])
        return stored + max((flying - 1) * saved + during, last) - float(made.saved[i])

    def _pipeline(self, cuts: tuple[int, ...], schedule: str, interleave: int, flying: Sequence[float]) -> Pipeline:
        stages = len(self.places)
        found = []
        for number, (i, j) in enumerate(itertools.pairwise(cuts)):
            figures = self.figures[number % stages]
            names = ("forward", "backward", "weight", "once", "gather", "travel", "update", "moved")
            sums = {name: float(self._of_pieces(figures, name)[i:j].sum()) for name in names}
            memory = self._memory(figures, flying[number], i, j)
            found.append(Stage(start=int(self.pieces[i]), stop=int(self.pieces[j]), memory=memory, **sums))
        held = [found[stage::stages] for stage in range(stages)]
        forward, backward, weight = (
            [math.fsum(getattr(s, name) for s in group) for group in held] for name in ("forward", "backward", "weight")
        )
        handed = [float(self.figures[n].handed[found[n].stop]) if n + 1 < len(found) else 0.0 for n in range(stages)]
        send = message_seconds(self.places, handed)
        seconds = pipeline_seconds(schedule, forward, backward, weight, send, self.count, interleave)
        after = once_seconds([once_of(group, self.unit_bytes) for group in held], self.places[0].cluster.backend, interleave)
        memory = max(math.fsum(s.memory for s in group) for group in held)
        return Pipeline(stages=tuple(found), schedule=schedule, interleave=interleave, step=seconds + after, memory=memory)
