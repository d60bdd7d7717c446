"""Bounds of pipelines that hold for every cut of the model into stages, whatever the memory is.

With K and K' of `least_passes`, X the least seconds of a pass over all strategies, and g the
seconds of what is sent of parameters, or done to them, once a step, p stages take

    p T >= min over the schedules of  max( K X,  min over strategies of K' X + g )

Smaller micro-batches are never faster: m' X' >= m X where m' >= m. So what is proven of some number
of micro-batches also bounds larger numbers on the same mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.planning.model.effort import EFFORT
from autopar.planning.space import Candidate, Multiplicities
from autopar.planning.stages.pieces import MAX_PIECES
from autopar.planning.tables import Tables
from autopar.search import nearly

from .by_mesh import Bounds
from .least_passes import ALL, NOTHING, UPDATES, Sight, least_passes

Schedule = tuple[str, int]
"""The name of a schedule, and its chunks on each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The least seconds of `passes` passes together with the work once a step that is in sight."""

    sight: Sight
    passes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """The least seconds of a candidate's stages, as solutions of its tables prove them.

    `passes`: of one pass of each of its micro-batches. `seen`: of passes with work once a step.
    """

    micro_batches: int
    passes: float
    seen: tuple[Seen, ...]


class PipelineBounds:
    """Proves bounds of candidates with stages by solutions of their own, and remembers them."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.folded = bounds.folded
        self.request = bounds.request
        self.backend = self.request.cluster.backend
        self._proven: dict[tuple[Candidate, str], Proven] = {}
        self._passed: dict[tuple[Candidate, str], Proven] = {}

    def proven(
        self, candidate: Candidate, recompute: str = "none", enough: float = math.inf
    ) -> Proven:
        """Return all that is proven of a candidate without a limit of memory.

        `enough`: seconds of a step; once so much is proven, the solution need not prove more.
        """
        key = (candidate, recompute)
        if key not in self._proven:
            passed = self.passed(candidate, recompute, enough)
            self._proven[key] = self._with_work_once(candidate, recompute, passed, enough)
        return self._proven[key]

    def passed(
        self, candidate: Candidate, recompute: str = "none", enough: float = math.inf
    ) -> Proven:
        """Return what the passes alone prove, which takes half the time of `proven`."""
        key = (candidate, recompute)
        if key not in self._passed:
            _, fewest = self._fewest(candidate)
            seconds = self._passes_alone(candidate, recompute, fewest, enough)
            count = candidate.micro_batches
            self._passed[key] = Proven(
                micro_batches=count, passes=count / fewest * seconds, seen=()
            )
        return self._passed[key]

    def carried(self, proven: Proven, candidate: Candidate) -> float:
        """Return seconds that no step of a candidate undercuts.

        `proven`: of the same mesh, with as many micro-batches as the candidate or fewer.
        """
        return min(
            self._under(proven, candidate, schedule, self.bounds.forced(candidate, schedule))
            for schedule in self.schedules(candidate)
        )

    def repeating(
        self, candidate: Candidate, schedules: Sequence[Schedule], recompute: str
    ) -> float:
        """Return the bound under some schedules that needs no solution with a recompute."""
        # Every pass repeats its share, whichever strategies are chosen.
        more = self.bounds.recompute.seconds(recompute) / candidate.mesh.devices
        proven = self.proven(candidate)
        return min(self._under(proven, candidate, schedule, more) for schedule in schedules)

    def free(self, candidate: Candidate, schedules: Sequence[Schedule], recompute: str) -> float:
        """Return the bound of a candidate under some schedules without a limit of memory."""
        return min(
            self._under(self.proven(candidate, recompute), candidate, schedule)
            for schedule in schedules
        )

    def by_sight(
        self, proven: Proven, candidate: Candidate, schedule: Schedule, forced: float = 0.0
    ) -> dict[Sight, float]:
        """Return seconds that all stages together take at the least, by what is in sight.

        `forced`: seconds that every pass of each micro-batch takes beyond what is proven.
        """
        count = candidate.micro_batches
        before = proven.micro_batches
        nothing = Seen(sight=NOTHING, passes=before, seconds=proven.passes)
        bounds = dict[Sight, float]()
        for seen in (nothing, *proven.seen):
            passes = self.passes(candidate, schedule, seen.sight)
            more = passes / count - seen.passes / before
            if more >= 0:
                # Further passes take at least their own seconds.
                seconds = seen.seconds + more * proven.passes
            else:
                # With fewer passes only a share of the proven seconds is certain.
                share = passes / count * before / seen.passes
                seconds = seen.seconds * max(share, 0.0)
            bounds[seen.sight] = seconds + max(passes, 0.0) / count * forced
        return bounds

    def schedules(self, candidate: Candidate) -> tuple[Schedule, ...]:
        """Return the schedules whose chunks are no more than the pieces of a model."""
        schedules = self.bounds.schedules(candidate.stages, candidate.micro_batches)
        return tuple(
            (name, chunks)
            for name, chunks in schedules
            # A model is cut into so many pieces at most, so there are no more chunks.
            if candidate.stages * chunks <= MAX_PIECES or chunks == 1
        )

    def passes(self, candidate: Candidate, schedule: Schedule, sight: Sight) -> float:
        """Return the least passes of a candidate under a schedule (see `least_passes`)."""
        pipe = self.bounds.pipe(candidate.stages, candidate.micro_batches)
        name, chunks = schedule
        return least_passes(pipe, name, chunks, sight)

    def work(
        self, candidate: Candidate, recompute: str, passes: float, sight: Sight
    ) -> Multiplicities:
        """Return the multiplicities of so many passes with the work once a step in sight."""
        return Multiplicities(
            counts=self.folded.counts,
            segments=self.folded.segments(recompute, short=True),
            accumulating=candidate.micro_batches > 1,
            passes=passes,
            once=sight.once,
            hidden=sight.hidden(self.backend),
        )

    def tables(self, candidate: Candidate, work: Multiplicities) -> Tables:
        """Return the tables of the whole model on the mesh of one of the candidate's stages."""
        analysis = self.folded.analysis(short=True, micro_batches=candidate.micro_batches)
        return self.bounds.tables(
            analysis, candidate.cluster.devices, candidate.stages, candidate.mesh, work
        )

    def _passes_alone(
        self, candidate: Candidate, recompute: str, fewest: float, enough: float
    ) -> float:
        # The bound must hold for every schedule, so that of fewest passes is solved.
        work = self.work(candidate, recompute, fewest, NOTHING)
        return self._least(candidate, self.tables(candidate, work), enough)

    def _fewest(self, candidate: Candidate) -> tuple[Schedule, float]:
        """Return the schedule of fewest passes, and their number."""
        fewest = min(
            self.schedules(candidate),
            key=lambda schedule: self.passes(candidate, schedule, NOTHING),
        )
        return fewest, self.passes(candidate, fewest, NOTHING)

    def _with_work_once(
        self, candidate: Candidate, recompute: str, passed: Proven, enough: float
    ) -> Proven:
        """Add to what the passes prove what they prove together with the work once a step."""
        schedule, alone = self._fewest(candidate)
        seen = []
        for sight in (ALL, UPDATES):
            passes = self.passes(candidate, schedule, sight)
            if passes <= 0:
                continue
            tables = self.tables(candidate, self.work(candidate, recompute, passes, sight))
            # Counting updates costs passes, and updates are mostly shorter than these.
            lost = (alone - passes) / candidate.micro_batches * passed.passes
            if sight is ALL or tables.least_updates() > lost:
                seconds = self._least(candidate, tables, enough)
                seen.append(Seen(sight=sight, passes=passes, seconds=seconds))
        return replace(passed, seen=tuple(seen))

    def _under(
        self, proven: Proven, candidate: Candidate, schedule: Schedule, forced: float = 0.0
    ) -> float:
        """Return seconds that no step of a candidate under one schedule undercuts."""
        # Each sight is a bound of its own, so the highest of them holds.
        return max(self.by_sight(proven, candidate, schedule, forced).values()) / candidate.stages

    def _least(self, candidate: Candidate, tables: Tables, enough: float) -> float:
        """Return a bound of the tables' sum, which may be loose once a step takes `enough`."""
        return nearly(
            tables.graph, close=EFFORT.bounded, enough=enough * candidate.stages
        ).lower_bound
