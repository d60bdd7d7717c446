"""The recompute that memory forces on a candidate, seen without a solution of its tables.

With S_r the bytes that a model saves for its backward pass on one device, for the whole batch and
with recompute r, D devices of M bytes each, and f the fewest micro-batches that any stage has in
flight, a candidate of m micro-batches may have r only if

    f S_r / m + parameters  <=  D M

No way to split an operator saves less than its share on every device, and every parameter is stored
somewhere. The mode of those left that repeats least work bounds the seconds of them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from autopar.order.schedules import in_flight
from autopar.planning.model import FoldedModel, Request
from autopar.planning.model.effort import EFFORT
from autopar.planning.space import Candidate
from autopar.planning.space.modes import recomputes_of
from autopar.planning.stages.estimate import saved_bytes
from autopar.planning.tables.alone import tables_alone
from autopar.search import solve

UNDERCUT = 0.95
"""The share of the tables' bytes that a program with stages may use.

Optimizer state that may be in host memory is not counted at all.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """A recompute on one device: seconds of the whole batch more than without, and saved bytes."""

    seconds: float
    saved: float


class ForcedRecompute:
    """The kinds of recompute that candidates may have, and the seconds that these repeat."""

    def __init__(self, folded: FoldedModel, request: Request) -> None:
        self.folded = folded
        self.request = request
        self.recomputes = recomputes_of(folded, request)

    def seconds(self, recompute: str) -> float:
        """Return the seconds that a kind of recompute repeats on one device, at the least."""
        return EFFORT.slack * self._of(recompute).seconds if recompute != "none" else 0.0

    def fits(
        self, candidate: Candidate, recompute: str, schedules: Sequence[tuple[str, int]]
    ) -> bool:
        """Whether a candidate may fit the memory with a kind of recompute.

        `schedules`: those that it may have.
        """
        if not self.request.train:
            return True
        stages = candidate.stages
        count = candidate.micro_batches
        # Of several chunks the last one, which may be nearly all of a stage, is in flight once.
        flying = min(
            (
                in_flight(name, stage, stages, count) if chunks == 1 else 1
                for name, chunks in schedules
                for stage in (0, stages - 1)
            ),
            default=1,
        )
        held = flying * self._of(recompute).saved / count
        limit = candidate.devices * self.request.memory_limit_on(candidate.cluster)
        # Stages are played with their own peaks, which may be below the sum of their tables.
        if stages > 1:
            limit /= UNDERCUT
        return held + self.folded.parameters <= limit

    def forced(self, candidate: Candidate, schedules: Sequence[tuple[str, int]]) -> float:
        """Return the seconds on one device that every plan of a candidate repeats.

        Where none fits, all of them are still looked at, so that the least memory is known.
        """
        # The first kind mostly fits, and repeats least.
        seconds = [
            self.seconds(recompute)
            for recompute in self.recomputes
            if self.fits(candidate, recompute, schedules)
        ]
        return min(seconds, default=0.0)

    def _of(self, recompute: str) -> Repeated:
        key = ("repeated", self.request.cluster, recompute)
        return self.folded.shared(key, partial(self._alone, recompute))

    def _alone(self, recompute: str) -> Repeated:
        analysis = self.folded.analysis(short=True)
        segments = self.folded.segments(recompute, short=True)
        tables, work = tables_alone(analysis, self.request.cluster, self.folded.counts, segments)
        solution = solve(tables.graph)
        # Only what is repeated counts, as bounds have the rest from elsewhere.
        before = self._of("none").seconds if recompute != "none" else 0.0
        return Repeated(seconds=solution.cost - before, saved=saved_bytes(tables, solution, work))
