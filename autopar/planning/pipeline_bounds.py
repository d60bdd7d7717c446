"""Bounds of pipelines: what no cut of the model into stages undercuts, whatever is sent, kept and recomputed.

With K and K' as of `passing`, X the least of a pass and g what is sent of parameters, or done to them, once a step, p stages take

    p T >= min over the schedules of  max( K X,  min over strategies of  K' X + g )                                          `Proven`

and within the memory M of a device, with a price on bytes, of which every stage keeps those of f micro-batches in flight at the least,

    p T >= max over prices q >= 0 of  min over strategies of  K' X + g + q ( stored + f saved - p M )                        `within`

in the mode (recompute, ZeRO) where that is least. Micro-batches that are parts of others are never faster: m' X' >= m X where m' >= m.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.order.schedules import in_flight
from autopar.search import CostGraph, NoAssignment, solve
from autopar.search.bounding import bound_within

from .bounds import Bounds
from .candidates import Candidate
from .passing import least_passes
from .pipelines import MAX_PIECES
from .solved import Mode
from .tables import Floats, Tables
from .work import Work

UNDERCUT = 0.95
"""Share of the bytes that tables add up to that a program may keep."""
GROUPS = (1, 2, 4, 1 << 30)
"""Numbers of chunks at which groups of schedules begin that are looked at together first."""
Schedule = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """Of a candidate: the least seconds of its micro-batches' passes, and of `beside` passes with what is `sent` once a step."""

    micro_batches: int
    passes: float
    beside: float
    sent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Modes that recompute the same, with their `zeros`, and schedules of a candidate; a bound of its step in all of them, and how often
    they were looked at within the memory."""

    recompute: str
    zeros: tuple[int, ...]
    schedules: tuple[Schedule, ...]
    bound: float
    looks: int = 0

    @property
    def alone(self) -> bool:
        """Whether it is one mode under one schedule."""
        return len(self.zeros) == len(self.schedules) == 1

    def parts(self) -> list[Leaf]:
        """Leaves of a ZeRO stage, or else of a schedule, each."""
        if len(self.zeros) > 1:
            return [replace(self, zeros=(zero,), looks=0) for zero in self.zeros]
        return [replace(self, schedules=(schedule,), looks=0) for schedule in self.schedules]


class PipelineBounds:
    """What solutions of their own prove of candidates with stages."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.subject, self.request = bounds, bounds.subject, bounds.request
        self.backend = self.request.cluster.backend
        self.known: dict[tuple[Candidate, str], Proven] = {}
        self.prices: dict[Candidate, float] = {}

    def proven(self, candidate: Candidate, recompute: str = "none") -> Proven:
        """What holds within any memory, too."""
        if (candidate, recompute) not in self.known:
            self.known[candidate, recompute] = self._proven(candidate, recompute)
        return self.known[candidate, recompute]

    def _proven(self, candidate: Candidate, recompute: str) -> Proven:
        count, work = candidate.micro_batches, self._work(candidate, recompute)
        least = min(self._schedules(candidate), key=lambda schedule: self._passes(candidate, schedule, 0.0))
        alone, beside = (self._passes(candidate, least, once) for once in (0.0, 1.0))
        passes = count / alone * self._least(candidate, replace(work, passes=alone, once=0.0))
        sent = self._least(candidate, replace(work, passes=beside)) if beside > 0 else 0.0
        return Proven(micro_batches=count, passes=passes, beside=beside, sent=sent)

    def carried(self, proven: Proven, candidate: Candidate) -> float:
        """Seconds that no step of a candidate undercuts, by what is proven of the same mesh with as many micro-batches or fewer."""
        return min(self._under(proven, candidate, schedule) for schedule in self._schedules(candidate))

    def _under(self, proven: Proven, candidate: Candidate, schedule: Schedule) -> float:
        """The same under one schedule."""
        count, before = candidate.micro_batches, proven.micro_batches
        found, beside = self._passes(candidate, schedule, 0.0) / count * proven.passes, self._passes(candidate, schedule, 1.0)
        if beside > 0 and proven.beside > 0:
            more = beside / count - proven.beside / before
            share = beside / count * before / proven.beside
            found = max(found, proven.sent + more * proven.passes if more >= 0 else proven.sent * share)
        return found / candidate.stages

    def _least(self, candidate: Candidate, work: Work) -> float:
        return solve(self._tables(candidate, work).graph).lower_bound

    # --- within the memory ---

    def leaves(self, candidate: Candidate, modes: Iterable[Mode]) -> list[Leaf]:
        """The modes and schedules of a candidate, with what is proven of it."""
        zeros: dict[str, list[int]] = {}
        for mode in modes:
            zeros.setdefault(mode.recompute, []).append(mode.zero)
        every = self._schedules(candidate)
        groups = [tuple(s for s in every if low <= s[1] < high) for low, high in itertools.pairwise(GROUPS)]
        return [
            Leaf(recompute=recompute, zeros=tuple(found), schedules=group, bound=self._free(candidate, group, "none"))
            for (recompute, found), group in itertools.product(zeros.items(), filter(None, groups))
        ]

    def _free(self, candidate: Candidate, schedules: Iterable[Schedule], recompute: str) -> float:
        """The bound of some schedules without a limit of memory."""
        return min(self._under(self.proven(candidate, recompute), candidate, schedule) for schedule in schedules)

    def closer(self, candidate: Candidate, leaves: Sequence[Leaf], room: float, enough: float) -> list[Leaf] | None:
        """Leaves, of which the least is looked at more closely, within `room` bytes of all stages; None where there is no closer look."""
        place = min(range(len(leaves)), key=lambda i: leaves[i].bound)
        leaf = leaves[place]
        if leaf.alone and leaf.looks > (leaf.schedules[0][1] > 1):
            return None
        if leaf.looks and not leaf.alone:
            found = [replace(part, bound=max(part.bound, self._free(candidate, part.schedules, part.recompute))) for part in leaf.parts()]
        elif leaf.bound < (free := self._free(candidate, leaf.schedules, leaf.recompute)):
            found = [replace(leaf, bound=free)]
        else:
            found = [self._limited(candidate, leaf, room, enough)]
        return [*leaves[:place], *found, *leaves[place + 1 :]]

    def _limited(self, candidate: Candidate, leaf: Leaf, room: float, enough: float) -> Leaf:
        """A leaf within the memory: at first as if each stage kept as little in flight as any."""
        ends = [self._ends(candidate, schedule) for schedule in leaf.schedules]
        work = replace(self._work(candidate, leaf.recompute), zero=min(leaf.zeros), once=self._once(candidate, leaf.schedules[-1]))
        try:
            if leaf.looks:
                found = self._tilted(candidate, leaf.schedules[0], work, room)
            else:
                passes = max(min(self._passes(candidate, schedule, work.once) for schedule in leaf.schedules), 0.0)
                work = replace(work, passes=passes, in_flight=min(min(pair) for pair in ends))
                graph = self._tables(candidate, work).graph
                if len(leaf.zeros) > 1:
                    graph = replace(graph, memory=self._tables(candidate, replace(work, zero=max(leaf.zeros))).graph.memory)
                near = bound_within(graph, room / UNDERCUT, price=self.prices.get(candidate, 0.0), enough=enough * candidate.stages)
                found, self.prices[candidate] = near.bound, near.price
        except NoAssignment:
            found = math.inf
        return replace(leaf, bound=max(leaf.bound, found / candidate.stages), looks=leaf.looks + 1)

    def _once(self, candidate: Candidate, schedule: Schedule) -> float:
        """Whether what is done once a step is counted: beside fewer passes, so that it has to be much."""
        proven = self.known[candidate, "none"]
        alone = self._passes(candidate, schedule, 0.0) * proven.passes / candidate.micro_batches
        more = self._passes(candidate, schedule, 1.0) - proven.beside
        return 1.0 if schedule[1] > 1 and more >= 0 and proven.sent + more * proven.passes / candidate.micro_batches > alone else 0.0

    def _tilted(self, candidate: Candidate, schedule: Schedule, work: Work, room: float) -> float:
        """Seconds of all stages where these keep what they do, and the first ones, which keep most, count for fewer passes."""
        first, last = self._ends(candidate, schedule)
        flying, passes = 0.5 * (first + last), self._passes(candidate, schedule, work.once)
        middle = replace(work, passes=passes, in_flight=flying)
        own = self._tables(candidate, middle).graph
        near = bound_within(own, room / UNDERCUT, price=self.prices.get(candidate, 0.0))
        price, choices = near.price, near.choices
        if not price:
            return near.bound
        more = self._tables(candidate, replace(middle, passes=passes + 1, in_flight=flying + 1)).graph
        second, kept = more.cost(choices) - own.cost(choices), more.memory_of(choices) - own.memory_of(choices)
        tilt = price * kept * (first - last) / second
        passes = self._passes(candidate, schedule, work.once, tilt)
        found = math.inf
        for side, keeps in ((-0.5, first), (0.5, last)):
            graph = self._tables(candidate, replace(work, passes=max(passes + side * tilt, 0.0), in_flight=keeps)).graph
            found = min(found, solve(_priced(graph, price)).lower_bound - price * room / UNDERCUT)
        return found

    def _ends(self, candidate: Candidate, schedule: Schedule) -> tuple[float, float]:
        """What the first and the last stage keep in flight."""
        name, chunks = schedule
        first, last = (in_flight(name, s, candidate.stages, candidate.micro_batches, chunks) for s in (0, candidate.stages - 1))
        return first, last

    def _work(self, candidate: Candidate, recompute: str) -> Work:
        segments = self.subject.segments(recompute, short=True)
        return Work(counts=self.subject.counts, segments=segments, accumulating=candidate.micro_batches > 1)

    def _schedules(self, candidate: Candidate) -> tuple[Schedule, ...]:
        """The schedules whose chunks are no more than the pieces into which a model is cut."""
        found = self.bounds.schedules(candidate.stages, candidate.micro_batches)
        return tuple((name, chunks) for name, chunks in found if candidate.stages * chunks <= MAX_PIECES or chunks == 1)

    def _passes(self, candidate: Candidate, schedule: Schedule, once: float, tilt: float = 0.0) -> float:
        """The passes beside that share of what is done once a step; the last stage counts for so many more than the first."""
        return least_passes(self.bounds.pipe(candidate.stages, candidate.micro_batches), *schedule, once, tilt, self.backend)

    def _tables(self, candidate: Candidate, work: Work) -> Tables:
        analysis = self.subject.analysis(short=True, micro_batches=candidate.micro_batches)
        return self.bounds.tables(analysis, candidate.cluster.devices, candidate.stages, candidate.mesh, work)


def _priced(graph: CostGraph, price: float) -> CostGraph:
    """The graph with so much for each byte."""
    known: dict[tuple[int, int], Floats] = {}
    unary = []
    for seconds, memory in zip(graph.unary, graph.memory or (), strict=True):
        key = id(seconds), id(memory)
        if key not in known:
            known[key] = seconds + price * memory
        unary.append(known[key])
    return replace(graph, unary=tuple(unary), memory=None)
