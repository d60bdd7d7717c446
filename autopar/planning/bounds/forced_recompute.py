"""The recompute that memory forces on a candidate, seen without a solution of its tables.

With S_r the bytes that a model saves for its backward pass on one device, for the whole batch and
with recompute r, M bytes on all devices of a stage, P those of all parameters, and f_s of the m
micro-batches in flight on stage s, a candidate may have r only if

    S_r / m  <=  sum over s of M / f_s  -  P / max over s of f_s

No way to split an operator saves less than its share on every device, and every parameter is stored
somewhere: stage s holds f_s times what it saves, and its parameters. The mode of those left that
repeats least work bounds the seconds of them all.
"""

from __future__ import annotations

import functools
import math
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

REMADE = 0.95
"""The share of the tables' bytes that a program with stages uses at the least if it recomputes.

What enters a segment is held as it comes, and tables count it as its readers gather it. Without
recompute a program uses all of these bytes. Optimizer state that may be in host memory is not
counted at all.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """A recompute on one device: seconds of the whole batch more than without, and saved bytes."""

    seconds: float
    saved: float


def least_used(recompute: str) -> float:
    """Return the share of the tables' bytes that a program with stages uses at the least."""
    return REMADE if recompute != "none" else 1.0


@functools.cache
def shares_in_flight(name: str, chunks: int, stages: int, count: int) -> tuple[float, float]:
    """Return the sum over all stages of 1 / f_s or a little more, and 1 / f_0, the least of them.

    Later stages have no more in flight. So of stages in a row the last one stands for all, and the
    rows double from the last stage on.
    """
    total = 0.0
    last = stages
    length = 1
    while last > 0:
        first = max(last - length, 0)
        total += (last - first) / in_flight(name, last - 1, stages, count, chunks)
        length = stages - first
        last = first
    return total, 1 / in_flight(name, 0, stages, count, chunks)


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
        limit = candidate.mesh.devices * self.request.memory_limit_on(candidate.cluster)
        if candidate.stages > 1:
            limit /= least_used(recompute)
        count = candidate.micro_batches
        flights = [(1.0, 1.0)]
        if candidate.stages > 1:
            flights = [
                shares_in_flight(*schedule, candidate.stages, count) for schedule in schedules
            ]
        # Parameters cost least where most is in flight, so that they take least room there.
        room = max(
            (limit * every - self.folded.parameters * least for every, least in flights),
            default=math.inf,
        )
        return self._of(recompute).saved / count <= room

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
