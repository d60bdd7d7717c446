"""How many passes of the whole model the step of a pipeline takes at the least, however unequal its stages are.

With x_e the seconds of a micro-batch on device e, of p, a schedule's closed form is the longest of many paths, so at least any mean of
them, and of a mean in which all devices count alike

    step >= sum over e of c_e x_e,  c_e = K / p        p step >= K X        X = sum of x_e

What a device sends of its parameters once a step, and its update, may run under one pass of its own, and while it waits for those before
it. With g of what all devices send and update, the mean over them leaves, of v chunks on each,

    p step >= K' X + g        where        c_e = (K' + 1) / p + (p - 1 - e) / (p v)

and with 1 - 1 / s of the collectives alone, by which they slow the pass that they run under, K' in place of K' + 1.

Interleaved: the mean is of the paths that stay on a device h, which makes s_h = 2 (p - 1 - h) + (v - 1) p chunk passes before its turns,

    sum over e < h of x_e / v  +  s_h / v max over e <= h of x_e  +  (m - s_h / v) x_h

1F1B, GPipe and zero-bubble, where the first stages keep more in flight and so count for fewer passes: the same with v = 1 and s_h = 0 (of
zero-bubble only the forward passes of the devices before h, as h may make its last gradients of weights at the end). Otherwise equal stages
are the fastest with more micro-batches than stages. By how much unequal ones may be faster with fewer was found by linear programs over
such paths, of up to 16 stages (`UNEVEN`; a slow test solves them).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from autopar.costmodel.step.pipeline import pipeline_seconds
from autopar.costmodel.step.timeline import SLOWDOWN

from .parameter_traffic import FORWARD
from .pipeline_estimate import Pipe

HALVINGS = 24
"""By how many the passes of an interleaved schedule are found."""
UNEVEN = ((0.25, (0.085, 1.0)), (0.99, (0.085, 0.3)), (1.0, (0.07, 0.13)), (1.3, (0.0, 0.1)), (1.99, (0.0, 0.03)), (math.inf, (0.0, 0.005)))
"""Up to so many micro-batches for each stage: the share of passes that unequal stages save, without and beside what is sent once a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How much of what is done once a step counts (0 or 1), and how much of a device's own pass it may be `under`: what is not, but could
    run under it, counts as far as it slows it."""

    once: float
    under: float

    def hidden(self, backend: str) -> float:
        """The share of parameters' collectives that does not count."""
        return self.once * (1 - self.under) / SLOWDOWN[backend]


NOTHING, UPDATES, ALL = Sight(once=0.0, under=0.0), Sight(once=1.0, under=0.0), Sight(once=1.0, under=1.0)


def least_passes(pipe: Pipe, schedule: str, chunks: int, sight: Sight, tilt: float = 0.0) -> float:
    """K of a schedule, K' where something done once a step is in sight.

    `tilt`: the last stage counts for so many passes more than the first, and the result is the mean.
    On shared cores waiting may cost nothing, and no stage counts for more than its own passes.
    """
    if pipe.share < 1.0:
        return pipe.micro_batches - 0.5 * abs(tilt)
    once, hidden = sight.once, sight.under
    if chunks > 1 or tilt:
        drained = FORWARD if schedule == "zero_bubble" else 1.0
        return _mixed(pipe.stages, pipe.micro_batches, chunks, once, tilt, drained) - hidden
    if pipe.micro_batches == 1 and schedule != "zero_bubble":
        return pipe.stages - once * (pipe.stages - 1) - hidden  # one after the other
    ratio = pipe.micro_batches / pipe.stages
    without, beside = next(shares for most, shares in UNEVEN if ratio <= most)
    waited = 0.5 * once * (pipe.stages - 1)
    return (_equal(schedule, pipe.stages, pipe.micro_batches, pipe.weight) - waited) * (1 - (beside if once else without)) - hidden


@functools.lru_cache(maxsize=4096)
def _equal(schedule: str, stages: int, count: int, weight: float) -> float:
    """The passes that equal stages take."""
    parts = (FORWARD, 1 - FORWARD, min(weight, 1 - FORWARD))
    forward, backward, weights = ([share] * stages for share in parts)
    return pipeline_seconds(schedule, forward, backward, weights, 0.0, count)


@functools.lru_cache(maxsize=4096)
def _mixed(stages: int, count: int, chunks: int, waited: float, tilt: float, drained: float) -> float:
    """The most passes K for which paths can be mixed so that device e has `waited` (p - 1 - e) / v more of p times the mean.

    `drained`: the share of a pass for which a path stays on the devices before its own.
    """
    more = [waited * (stages - 1 - h) / chunks + tilt * (h / (stages - 1) - 0.5) for h in range(stages)]
    before = [min(2 * (stages - 1 - h) + (chunks - 1) * stages, count * chunks) / chunks if chunks > 1 else 0.0 for h in range(stages)]

    def mixed(passes: float) -> bool:
        """Whether the shares of the paths, the lowest devices first, suffice for so many passes."""
        left, below, spare, lacking = 1.0, 0.0, 0.0, 0.0
        for h in reversed(range(stages)):
            wanted = max((passes + more[h]) / stages - drained * below / chunks, 0.0)
            own = count - before[h]
            share = min(wanted / own, left) if own > 0 else 0.0
            left, below, spare = left - share, below + share, spare + share * before[h]
            lacking += max(wanted - share * own, 0.0)
        return lacking <= spare

    low, high = 0.0, float(count + stages)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if mixed(middle) else (low, middle)
    return low
