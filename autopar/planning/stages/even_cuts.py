"""The cuts that even out the load of stages, within the memory of each device and its host.

    cost_s[i, j] = m (forward + backward) + once + update      infinite if it does not fit

cost_s[i, j] is the seconds of stage s for the pieces i to j - 1, in a step of m micro-batches (see
`piece_costs`, and `stage_memory` for what fits). `autopar.search` finds the cuts that minimise the
slowest stage. Its least time is found first, because tables are then needed only for stages that
take no longer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from autopar.search import balance, least_worst, partition

from .piece_costs import Floats, PieceCosts
from .stage import on_one_device
from .stage_memory import Ints

WIDE = 3.0
"""The longest chunk, in multiples of the slowest stage, while a device's chunks are balanced."""
NEAR = 1e-3
"""The relative precision to which the least time of the slowest stage is found first."""
SPARE = 8
"""The pieces of a stage, in multiples of an equal part, that are looked at first."""
HALVINGS = 16
"""Steps of bisection for the least memory of the fullest stage."""
SHARES = 5
"""The number of shares of a device to try as the limit of one of its chunks."""
ROUNDED = 1 + 1e-9
"""The factor on a limit, against rounding."""


class EvenCuts:
    """Cuts of pieces into stages that take about equally long.

    `limits`, `hosts`: of each stage the bytes of a device, and of host memory for a device.
    `flying` in its methods: the micro-batches that each stage, or chunk, has in flight.
    """

    def __init__(self, costs: PieceCosts, limits: Sequence[float], hosts: Sequence[float]) -> None:
        self.costs = costs
        self.limits = limits
        self.hosts = hosts

    def least_memory(self, flying: Sequence[float]) -> float:
        """Return the least bytes of a device with which stages hold the whole model."""
        low = 0.0
        high = max(
            self.costs.memory(stage).of(flown, 0, self.costs.count)[0]
            for stage, flown in enumerate(flying)
        )
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            if self._reaches_end(flying, [middle] * len(flying)):
                high = middle
            else:
                low = middle
        return high

    def _reaches_end(self, flying: Sequence[float], limits: Sequence[float]) -> bool:
        """Return whether stages, or chunks, of at most so many bytes can hold the whole model."""
        end = 0
        stages = len(self.limits)
        # Each stage holds as many pieces as it can: that leaves least for those behind it.
        for chunk, (flown, limit) in enumerate(zip(flying, limits, strict=True)):
            end = self.costs.memory(chunk % stages).from_start(flown, limit, end)
        return end == self.costs.count

    def within(self, flying: Sequence[float], interleave: int) -> tuple[int, ...] | None:
        """Return the best cuts with which the chunks of every device fit together.

        One chunk may need more than another. So each may fill a share of its device, tried from all
        of it down to an equal part; the largest share with which all sums fit is taken.
        """
        for share in np.geomspace(1.0, 1.0 / interleave, SHARES) if interleave > 1 else (1.0,):
            cuts = self._within_share(flying, interleave, float(share))
            if cuts is not None and self.fit_together(cuts, flying):
                return cuts
        return None

    def fit_together(self, cuts: tuple[int, ...], flying: Sequence[float]) -> bool:
        """Return whether the chunks of every device fit it, and its host."""
        stages = len(self.limits)
        chunks = []
        hosted = [0.0] * stages
        for chunk, (i, j) in enumerate(itertools.pairwise(cuts)):
            stage = chunk % stages
            chunks.append(self.costs.stage(stage, i, j, flying[chunk]))
            hosted[stage] += self.costs.memory(stage).host_of(i, j)
        each = (on_one_device(chunks[stage::stages]) for stage in range(stages))
        held = [math.fsum(chunk.memory for chunk in own) for own in each]
        return all(
            used <= limit * ROUNDED
            for used, limit in zip((*held, *hosted), (*self.limits, *self.hosts), strict=True)
        )

    def _within_share(
        self, flying: Sequence[float], interleave: int, share: float
    ) -> tuple[int, ...] | None:
        """Return the best cuts with each chunk within `share` of its device, or None."""
        stages = len(self.limits)
        factor = ROUNDED if interleave == 1 else WIDE
        limits = [limit * share for limit in self.limits]
        hosts = [host * share for host in self.hosts]
        flown = list(flying[:stages])
        # That nothing fits is known at once, without the reach from every piece on.
        if not self._reaches_end(flown * interleave, limits * interleave):
            return None
        # Most stages are short, so it takes less time to look at short ones alone first.
        short = (1 << (SPARE * (self.costs.count + 1) // (stages * interleave)).bit_length()) - 1
        lengths: tuple[int | None, ...] = (None,)
        if short < self.costs.count:
            lengths = (short, None)
        for most_pieces in lengths:
            reach = self.costs.reach(flown, limits, hosts, most_pieces)
            worst = least_worst(self.costs.totals * interleave, reach * interleave, exact=NEAR)
            if worst < math.inf and (
                most_pieces is None
                or max(_longest(total, worst * factor) for total in self.costs.totals)
                <= most_pieces
            ):
                break
        if worst == math.inf:
            return None
        # Tables of short intervals come first; whole ones are made only if these leave no cuts.
        for most in (worst * factor, math.inf):
            if most == math.inf and most_pieces is not None:
                reach = self.costs.reach(flown, limits, hosts)
            longest = max(
                _longest(total, most, far)
                for total, far in zip(self.costs.totals, reach, strict=True)
            )
            costs = self.costs.costs(reach, longest) * interleave
            cuts = partition(costs)
            if cuts is not None:
                return balance(cuts, costs, stages) if interleave > 1 else cuts
        return None


def _longest(total: Floats, most: float, reach: Ints | None = None) -> int:
    """Return the most consecutive pieces that take up to `most` seconds and are within `reach`."""
    ends = np.searchsorted(total, total + most, side="right") - 1
    if reach is not None:
        ends = np.minimum(ends, reach)
    return max(int((ends - np.arange(len(total))).max()), 1)
