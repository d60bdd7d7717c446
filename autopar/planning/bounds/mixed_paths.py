"""Means of paths through the order of a pipeline's passes, with all devices weighed alike.

The notation is that of `least_passes`. A path stays on one device h for most of the step. An
interleaved schedule runs s_h = 2 (p - 1 - h) + (v - 1) p chunks on it before its turns:

    sum over e < h of x_e / v  +  s_h / v max over e <= h of x_e  +  (m - s_h / v) x_h

Schedules of one chunk a device are the same with v = 1 and s_h = 0. Where gradients of weights are
passes of their own, only the forward passes of the devices before h count, as h may compute its
last gradients of weights at the end.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

HALVINGS = 24
"""Steps of bisection for the passes of an interleaved schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The paths of a schedule of `count` micro-batches.

    `more`: how many passes more than the mean each device is to have, times the stages.
    `drained`: the share of a pass for which a path stays on each device before its own.
    """

    count: int
    chunks: int
    more: tuple[float, ...]
    drained: float

    @property
    def stages(self) -> int:
        """Number of devices."""
        return len(self.more)

    def turns(self, device: int) -> int:
        """Return the chunks that a device runs before its turns."""
        if self.chunks == 1:
            return 0
        turns = 2 * (self.stages - 1 - device) + (self.chunks - 1) * self.stages
        return min(turns, self.count * self.chunks)

    def give(self, passes: float) -> bool:
        """Whether shares of paths on each device that sum to 1 give all so many passes."""
        remaining = 1.0
        below = 0.0
        spare = 0.0
        lacking = 0.0
        # The last devices come first: a path on a device also weighs on all devices before it.
        for device in reversed(range(self.stages)):
            wanted = (passes + self.more[device]) / self.stages - self.drained * below / self.chunks
            wanted = max(wanted, 0.0)
            turns = self.turns(device)
            own = (self.count * self.chunks - turns) / self.chunks
            share = min(wanted / own, remaining) if own > 0 else 0.0
            # Of what is left, so that no rounding of the share is lacking.
            lacking += max(wanted - remaining * own, 0.0)
            remaining -= share
            below += share
            # Any device up to this one may use the chunks before its turns.
            spare += share * turns / self.chunks
        return lacking <= spare


@functools.lru_cache(maxsize=4096)
def most_passes(paths: Paths) -> float:
    """Return the most passes that a mean of the paths gives to all devices."""
    low = 0.0
    high = float(paths.count + paths.stages)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        if paths.give(middle):
            low = middle
        else:
            high = middle
    return low
