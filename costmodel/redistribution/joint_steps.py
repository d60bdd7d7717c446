"""Steps over several mesh axes as one group, for tensors that lie alike on all of them.

    D[s, t] = min over kinds x of  D[s, t with x on A] + step(x -> y on A)

Here t has y on all axes of A. Such layouts are a diagonal of the space of all layouts, so the
arrays are small.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import minimise
from autopar.sharding.layout import Kind
from autopar.sharding.mesh import Axes, axis_sets, degree_of
from autopar.sharding.redistribution import may_change, transfers

from .layout_space import LayoutSpace
from .step_prices import Charges, Moves

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointPattern:
    """The part of the steps over a set of axes that all tensors share.

    `codes`: the layouts with kind x on all axes of the set, for every choice of the other axes:
    array [x, others]. `step`: the kind of step of every pair of kinds x, y. `counts`: the number of
    shards of each of these layouts, as an index into `LayoutSpace.shard_counts`. `blocked`:
    infinite where nesting forbids the step: array [x, y, others].
    """

    axes: Axes
    partial: tuple[int, ...]
    moves: Moves
    codes: Ints
    step: Ints
    counts: Ints
    blocked: Floats

    def costs(
        self, space: LayoutSpace, nbytes: int, valid: NDArray[np.bool_], charges: Charges
    ) -> Floats:
        """Return the prices of the steps: array [x, y, others, 1].

        Infinite: a step that no layout may take, or not this one.
        """
        seconds = self.moves.seconds(self.axes, nbytes / space.shard_counts, charges)
        cost = seconds[self.step[:, :, None], self.counts[:, None]] + self.blocked
        cost[:, ~valid[self.codes]] = math.inf  # the reached layout must divide
        return cost[..., None]

    def relax(self, costs: Floats, reach: Floats, closed: Floats) -> bool:
        """Take the steps where they are cheaper, and say whether any is.

        `closed`: infinite for sources that are not partial.
        """
        before = reach[self.codes]
        origin = before.copy()
        # As on single axes: only what was partial at the source is summed.
        for x in self.partial:
            origin[x] += closed
        stepped = np.empty_like(before)
        minimise(stepped, (origin[:, None], costs))
        if not (stepped < before).any():
            return False
        reach[self.codes] = np.minimum(before, stepped)
        return True


@functools.lru_cache(maxsize=4096)
def joint_patterns(space: LayoutSpace) -> tuple[JointPattern, ...]:
    """The steps over every set of several axes."""
    return tuple(_pattern(space, axes) for axes in axis_sets(space.mesh) if len(axes) > 1)


def _pattern(space: LayoutSpace, axes: Axes) -> JointPattern:
    digits = space.digits()
    count = len(space.kinds)
    alike = (digits[:, axes] == digits[:, axes[:1]]).all(axis=1)
    codes = np.stack([np.flatnonzero(alike & (digits[:, axes[0]] == x)) for x in range(count)])
    inner = [axis for axis in range(axes[0] + 1, len(space.mesh)) if axis not in axes]
    degree = degree_of(axes, space.mesh)
    moves = Moves()
    step = np.zeros((count, count), dtype=np.int64)
    blocked = np.full((count, count, codes.shape[1]), math.inf)
    for x, before in enumerate(space.kinds):
        for y, after in enumerate(space.kinds):
            if x == y or not may_change(before, after):
                continue
            blocked[x, y] = 0.0
            for index, kind in ((x, before), (y, after)):
                if kind.kind is Kind.SPLIT and inner:
                    blocked[x, y][(digits[codes[x]][:, inner] == index).any(axis=1)] = math.inf
            step[x, y] = moves.number(*transfers(before, after, degree))
    return JointPattern(
        axes=axes,
        moves=moves,
        codes=codes,
        step=step,
        blocked=blocked,
        partial=tuple(x for x, kind in enumerate(space.kinds) if kind.kind is Kind.PARTIAL),
        counts=np.searchsorted(space.shard_counts, space.divisors()[codes]),
    )
