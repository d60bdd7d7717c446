"""Means of paths through the order of a pipeline's passes, with given weights of the devices.

The notation is that of `least_passes`; S_e: seconds of a message from device e to the next one. A
path stays on one device h for most of the step. An interleaved schedule runs s_h = 2 (p - 1 - h) +
(v - 1) p chunks on it before its turns:

    sum over e < h of (x_e / v + 2 S_e)  +  s_h / v max over e <= h of x_e  +  (m - s_h / v) x_h

Schedules of one chunk a device are the same with v = 1 and s_h = 0. Where gradients of weights are
passes of their own, only the forward passes of the devices before h count, as h may compute its
last gradients of weights at the end. With several chunks a path may go around all devices for
(v - 1) p of the s_h chunks, with a micro-batch on its rounds:

    sum over all e of ((v - 1) x_e / v + 2 (v - 1) S_e)  +  2 (p - 1 - h) / v max over e of x_e
    +  sum over e < h of (x_e / v + 2 S_e)  +  (m - s_h / v) x_h

Or it goes down to the last device, stays there for p turns, as long as its micro-batch waits for
the next chunk, and only then comes around to h, at both ends of the step:

    sum over all e of ((v - 1) x_e / v + 2 v S_e)  +  sum over e < p - 1 of x_e / v
    +  (2 p + 1) / v x_(p - 1)  +  sum over e < h of (x_e / v + 2 S_e)
    +  (m - s_h / v - (4 h + 4) / v) x_h

On the first devices such paths are longer, and have more weight elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

HALVINGS = 24
"""Steps of bisection for the passes of an interleaved schedule."""
REPEATS = 3
"""How often the share of the paths by way of the last device is worked out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean of paths that gives every device its weight.

    `passes`: K of `least_passes`. `messages`: how often it has those from each device to the next.
    """

    passes: float
    messages: tuple[float, ...]


# Without slots, as what is worked out of its fields is asked for again and again.
@dataclass(frozen=True, kw_only=True)
class Paths:
    """The paths of a schedule of `count` micro-batches.

    `weights`: of the devices, with the sum 1. `more`: how many passes more than by its weight each
    device is to have, times the stages.
    `drained`: the share of a pass for which a path stays on each device before its own. `rounds`:
    how often each goes around all devices. `late`: the number of the first devices to which they
    come by way of the last one.
    """

    count: int
    chunks: int
    weights: tuple[float, ...]
    more: tuple[float, ...]
    drained: float
    rounds: int
    late: int = 0

    @functools.cached_property
    def stages(self) -> int:
        """Number of devices."""
        return len(self.more)

    @functools.cached_property
    def owns(self) -> list[float]:
        """The passes that the path on each device has there in turns."""
        return [self.own(device, late=device < self.late) for device in range(self.stages)]

    @functools.cached_property
    def others(self) -> list[float]:
        """The passes of the slowest device that the path on each device has before its turns."""
        return [
            0.0
            if device < self.late
            else (self.turns(device) - self.rounds * self.stages) / self.chunks
            for device in range(self.stages)
        ]

    def turns(self, device: int) -> int:
        """Return the chunks that a device runs before its turns."""
        if self.chunks == 1:
            return 0
        turns = 2 * (self.stages - 1 - device) + (self.chunks - 1) * self.stages
        return min(turns, self.count * self.chunks)

    @property
    def most_late(self) -> int:
        """The first devices that a path may reach late, and is longer if it does."""
        if not self.rounds or self.count < 2 * self.stages:
            return 0
        devices = range((self.stages - 1) // 2)
        return sum(self.own(device, late=True) > 0 for device in devices)

    def own(self, device: int, *, late: bool) -> float:
        """Return the passes that a path has on its own device in turns, if it comes there late."""
        spent = 4 * (device + 1) if late else 0
        return (self.count * self.chunks - self.turns(device) - spent) / self.chunks

    def shares(self, passes: float, wrapped: float) -> list[float] | None:
        """Return shares of paths on each device that sum to 1 and give all so many passes.

        `wrapped`: the share of late paths, at least. None: there are none.
        """
        remaining = 1.0 - wrapped
        below = 0.0
        spare = 0.0
        lacking = 0.0
        shares = [0.0] * self.stages
        # The last devices come first: a path on a device also weighs on all devices before it.
        for device in reversed(range(self.stages)):
            if device == self.late - 1:
                remaining += wrapped
            beside = 2 * self.stages + 1 if device == self.stages - 1 else 1
            weighed = (self.rounds + self.drained * below + wrapped * beside) / self.chunks
            wanted = passes * self.weights[device] + self.more[device] / self.stages - weighed
            wanted = max(wanted, 0.0)
            own = self.owns[device]
            share = min(wanted / own, remaining) if own > 0 else 0.0
            # Of what is left, so that no rounding of the share is lacking.
            lacking += max(wanted - remaining * own, 0.0)
            remaining -= share
            below += share
            shares[device] = share
            # Any device may use these chunks, but none behind this one unless the path goes around.
            spare += share * self.others[device]
        return shares if lacking <= spare else None


@functools.lru_cache(maxsize=4096)
def mixed(paths: Paths) -> Mean:
    """Return the mean of paths that gives all devices most passes."""
    means = []
    for late in sorted({0, paths.most_late // 2, paths.most_late}):
        some = replace(paths, late=late)
        wrapped = 0.0
        for _ in range(REPEATS if late else 1):
            passes, shares = _most(some, wrapped)
            means.append(Mean(passes=passes, messages=_messages(some, shares, wrapped)))
            # What they weigh elsewhere was not known before their share was.
            wrapped = sum(shares[:late])
    return max(means, key=lambda mean: mean.passes)


def _most(paths: Paths, wrapped: float) -> tuple[float, Sequence[float]]:
    """Return the most passes for which there are shares, and these shares."""
    low = 0.0
    high = float(paths.count + paths.stages)
    best: Sequence[float] = [0.0] * paths.stages
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        shares = paths.shares(middle, wrapped)
        if shares is None:
            high = middle
        else:
            low = middle
            best = shares
    return low, best


def _messages(paths: Paths, shares: Sequence[float], wrapped: float) -> tuple[float, ...]:
    """Return how often a mean has the messages from each device to the next one."""
    above = [sum(shares[device + 1 :]) for device in range(paths.stages)]
    return tuple(2 * (paths.rounds + wrapped + share) for share in above)
