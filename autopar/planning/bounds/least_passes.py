"""The least number of passes of the whole model that a pipeline's step takes, for any cut.

A step of p stages lasts at least K / p passes of the whole model. This module computes K.

Notation: p stages of v chunks each, m micro-batches, x_e the seconds of a micro-batch on device e,
X the sum of all x_e, s the factor by which communication slows a pass.

The closed form of a schedule is the longest of many paths through its order. A weighted mean of
paths is therefore a lower bound. If the mean gives every device the same weight K / p, then

    step >= sum over e of (K / p) x_e = K X / p

A device may send its parameters, and update them, under one pass of its own and while it waits for
the devices before it. Let g be the seconds of this work on all devices. Means whose weights leave
room for that waiting,

    weight of e = (K' + 1) / p + (p - 1 - e) / (p v)

give p step >= K' X + g. If only the part of g counts by which communication slows its pass, which
is 1 - 1 / s of it, K' takes the place of K' + 1.

The paths, and their means, are those of `mixed_paths`.

Where devices need not be weighted differently, equal stages are the fastest cut if there are more
micro-batches than stages. With fewer, unequal stages may save a share of the passes. `UNEVEN` holds
that share; it was found by linear programs over such paths for up to 16 stages, which a slow test
solves again. It is not that of merged passes, whose bound is the mean for one chunk, too.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from autopar.costmodel.step.covered import SLOWDOWN
from autopar.order.schedules import schedule_named, step_seconds
from autopar.order.times import Times
from autopar.planning.stages.estimate import Pipe
from autopar.planning.tables.parameters.traffic import FORWARD

from .mixed_paths import Paths, most_passes

UNEVEN = (
    (0.25, (0.085, 1.0)),
    (0.99, (0.085, 0.3)),
    (1.0, (0.07, 0.13)),
    (1.3, (0.0, 0.1)),
    (1.99, (0.0, 0.03)),
    (math.inf, (0.0, 0.005)),
)
"""Rows of (most micro-batches for each stage, shares of passes that unequal stages may save).

The first share is for the passes alone, the second for passes beside work that is done once a step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The work that a bound counts beside passes.

    `once`: 1 if updates and what parameters send once a step count, else 0. `under`: 1 if that work
    counts in full, and one pass of its device, under which it may run, does not. With 0 the pass
    counts, and of the work only what slows the pass.
    """

    once: float
    under: float

    def hidden(self, backend: str) -> float:
        """Return the share of the parameters' collectives that does not count."""
        return self.once * (1 - self.under) / SLOWDOWN[backend]


NOTHING = Sight(once=0.0, under=0.0)
UPDATES = Sight(once=1.0, under=0.0)
ALL = Sight(once=1.0, under=1.0)


def least_passes(pipe: Pipe, schedule: str, chunks: int, sight: Sight) -> float:
    """Return K of a schedule, or K' if work done once a step is in `sight`."""
    if pipe.share < 1.0:
        # On shared cores waiting may cost nothing, so stages count for no more than their passes.
        return pipe.micro_batches
    row = schedule_named(schedule)
    splits = row.splits
    # Merged passes keep more in flight, so that unequal stages save more.
    if chunks > 1 or row.merges:
        return most_passes(_paths(pipe, schedule, chunks, sight)) - sight.under
    if pipe.micro_batches == 1 and not splits:
        # The stages run one after the other, each while all others wait.
        return pipe.stages - sight.once * (pipe.stages - 1) - sight.under
    ratio = pipe.micro_batches / pipe.stages
    alone, beside = next(shares for most, shares in UNEVEN if ratio <= most)
    saved = beside if sight.once else alone
    waited = 0.5 * sight.once * (pipe.stages - 1)
    equal = _equal(schedule, pipe.stages, pipe.micro_batches, pipe.weight)
    return (equal - waited) * (1 - saved) - sight.under


def _paths(pipe: Pipe, schedule: str, chunks: int, sight: Sight) -> Paths:
    """Return the paths of a schedule that a bound is a mean of."""
    return Paths(
        count=pipe.micro_batches,
        chunks=chunks,
        more=_more_weights(pipe.stages, chunks, sight.once),
        drained=FORWARD if schedule_named(schedule).splits else 1.0,
    )


@functools.lru_cache(maxsize=4096)
def _equal(schedule: str, stages: int, count: int, weight: float) -> float:
    """Return the passes that a step of equal stages takes."""
    parts = (FORWARD, 1 - FORWARD, min(weight, 1 - FORWARD))
    forward, backward, weights = ([share] * stages for share in parts)
    return step_seconds(schedule, Times.of(forward, backward, weights), count)


def _more_weights(stages: int, chunks: int, waited: float) -> tuple[float, ...]:
    """Return how many passes more than the mean each device's weight is, times the stages."""
    return tuple(waited * (stages - 1 - device) / chunks for device in range(stages))
