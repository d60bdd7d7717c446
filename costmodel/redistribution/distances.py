"""Prices of all redistributions of a tensor at once: shortest paths over every layout of the mesh.

    D[s, t] = min over sets of axes A, kinds x of  D[s, t with x on A] + step(x -> t[A])

It is Bellman's equation, relaxed set by set. A is one axis, or several on which t is the same, as
one group (`joint_steps`). A step's price is linear in the bytes of the shard:
`sharding.redistribution.transfers` says what is sent, `step_prices` what that costs, with the lines
of `step.mesh_prices`. `sharding.redistribution.cheapest_chain` is the scalar reference, used for
the chains of the chosen plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import minimise
from autopar.sharding.layout import Kind
from autopar.sharding.mesh import axis_sets
from autopar.sharding.redistribution import STEP_PENALTY, may_change, transfers

from .joint_steps import joint_patterns
from .layout_space import LayoutSpace
from .step_prices import Charges, LinePrices, Moves


def distances(
    space: LayoutSpace,
    shape: Sequence[int],
    nbytes: int,
    price: LinePrices,
    *,
    gradient: bool,
    sources: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return the seconds of the cheapest redistribution from each of `sources` to every layout.

    The result is an array [sources, layouts].
    """
    return Distances(space, shape, nbytes, Charges(lines=price), gradient=gradient).rows(sources)


class Distances:
    """Prices of all redistributions of a tensor, worked out for a source when it is needed."""

    def __init__(
        self,
        space: LayoutSpace,
        shape: Sequence[int],
        nbytes: int,
        charges: Charges,
        *,
        gradient: bool,
    ) -> None:
        self.space = space
        self.valid = space.valid(shape)
        # Nothing flows back to a value without a gradient.
        if not gradient:
            charges = replace(charges, often=(charges.often[0], 0.0))
        self.steps = [
            _axis_costs(space, axis, nbytes, self.valid, charges) for axis in range(len(space.mesh))
        ]
        self.joint = [
            (p, p.costs(space, nbytes, self.valid, charges)) for p in joint_patterns(space)
        ]
        self.partial = np.flatnonzero([kind.kind is Kind.PARTIAL for kind in space.kinds])
        self.known = np.zeros(space.size, dtype=bool)
        self.prices = np.empty((space.size, space.size))

    def rows(self, sources: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds from each of `sources` to every layout."""
        # Most layouts are the source of no redistribution: their rows are never worked out.
        if not self.known[sources].all():
            wanted = np.zeros(self.space.size, dtype=bool)
            wanted[sources] = True
            fresh = np.flatnonzero(wanted & ~self.known)
            self.prices[fresh] = self._reach(fresh).T
            self.known[fresh] = True
        return self.prices[sources]

    def rows_from_storage(
        self, sources: NDArray[np.int64], share: LinePrices, nbytes: int, exposed: float = 1.0
    ) -> NDArray[np.float64]:
        """Return the prices from a parameter's storage.

        Leading R -> B steps bear their `share` of a bucket, times `exposed`.
        """
        names = [kind.kind for kind in self.space.kinds]
        prices = self.rows(sources).copy()
        if Kind.BROADCAST not in names:
            return prices
        whole = names.index(Kind.REPLICATED)
        part = names.index(Kind.BROADCAST)
        digits = self.space.digits()[sources]
        shards = self.space.divisors()[sources]
        # The relaxation knows no price that depends on coming first, so each leading step is tried
        # by itself (as in `parameter_chain`).
        for lead in axis_sets(self.space.mesh):
            chosen = np.nonzero((digits[:, lead] == whole).all(axis=1))[0]
            after = digits[chosen].copy()
            after[:, lead] = part
            # A parameter's part has one line, as the algorithm is chosen for the whole message.
            (alpha, beta) = share("all_reduce", lead)[-1]
            cost = exposed * (alpha + beta * nbytes / shards[chosen]) + STEP_PENALTY
            prices[chosen] = np.minimum(
                prices[chosen], cost[:, None] + self.rows(self.space.codes(after))
            )
        return prices

    def _reach(self, sources: NDArray[np.int64]) -> NDArray[np.float64]:
        """Array [layouts, sources]: relaxed set by set of axes until none changes anything."""
        space = self.space
        axes = len(space.mesh)
        sets = len(space.mesh) + len(self.joint)
        reach = np.full((space.size, len(sources)), math.inf)
        reach[sources, np.arange(len(sources))] = 0.0
        # A layout with unequal shards is reached from nowhere, not even from itself.
        reach[~self.valid] = math.inf
        # No chain makes a whole value partial only to sum it again.
        digits = space.digits()[sources]
        closed = [
            np.where(np.isin(digits[:, axis], self.partial), 0.0, math.inf) for axis in range(axes)
        ]
        turn = 0
        settled = 0
        while settled < sets:
            if turn < axes:
                changed = self._along(turn, reach, closed[turn])
            else:
                pattern, costs = self.joint[turn - axes]
                changed = pattern.relax(
                    costs, reach, np.maximum.reduce([closed[axis] for axis in pattern.axes])
                )
            settled = 0 if changed else settled + 1
            turn = (turn + 1) % sets
        return reach

    def _along(self, axis: int, reach: NDArray[np.float64], closed: NDArray[np.float64]) -> bool:
        """Relax the steps on an axis, and say whether anything changed.

        `closed`: infinite for sources not partial there.
        """
        size = len(self.space.kinds)
        axes = len(self.space.mesh)
        # One operation relaxes all layouts that differ on this axis alone.
        grid = reach.reshape(size**axis, size, size ** (axes - axis - 1), -1)
        origin = grid
        if self.partial.size:
            origin = grid.copy()
            origin[:, self.partial] += closed
        stepped = np.empty_like(grid)
        minimise(stepped, (origin.transpose(1, 0, 2, 3)[:, :, None], self.steps[axis]))
        if not (stepped < grid).any():
            return False
        np.minimum(grid, stepped, out=grid)
        return True


def _axis_costs(
    space: LayoutSpace, axis: int, nbytes: int, valid: NDArray[np.bool_], charges: Charges
) -> NDArray[np.float64]:
    """Return the prices of the steps on `axis` from kind x to kind y, by the other axes' kinds.

    The result is an array [x, outer, y, inner, 1]; infinite: a step that no layout may take, or not
    this one.
    """
    pattern = _pattern(space, axis)
    by_count = pattern.moves.seconds((axis,), nbytes / space.shard_counts, charges)
    cost = (
        by_count[pattern.step, pattern.counts_of_step].reshape(pattern.blocked.shape)
        + pattern.blocked
    )
    cost[:, ~valid.reshape(pattern.shape)] = math.inf  # the reached layout must divide
    return cost[..., None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pattern:
    """The part of the steps on one axis that all tensors share.

    Layouts are laid out as [outer, kind, inner]. `step`: the kind of step of every pair of kinds x,
    y. `counts_of_step`: for every pair and every layout [outer, inner] before it, the number of
    shards as an index into `LayoutSpace.shard_counts`. `blocked`: infinite where nesting forbids
    the step: array [x, outer, y, inner].
    """

    shape: tuple[int, int, int]
    moves: Moves
    step: NDArray[np.int64]
    counts_of_step: NDArray[np.int64]
    blocked: NDArray[np.float64]


@functools.lru_cache(maxsize=4096)
def _pattern(space: LayoutSpace, axis: int) -> _Pattern:
    size = len(space.kinds)
    axes = len(space.mesh)
    shape = (size**axis, size, size ** (axes - axis - 1))
    inner = space.digits()[:, axis + 1 :].reshape(*shape, -1)
    moves = Moves()
    step = np.zeros((size, size), dtype=np.int64)
    blocked = np.full((size, shape[0], size, shape[2]), math.inf)
    for x, before in enumerate(space.kinds):
        for y, after in enumerate(space.kinds):
            if x == y or not may_change(before, after):
                continue
            blocked[x, :, y] = 0.0
            for index, kind in ((x, before), (y, after)):
                # Where an inner axis splits the same dim, its pieces lie inside this axis's, and
                # would no longer be contiguous shards behind the step.
                if kind.kind is Kind.SPLIT and axis + 1 < axes:
                    blocked[x, :, y][(inner[:, x] == index).any(axis=-1)] = math.inf
            step[x, y] = moves.number(*transfers(before, after, space.mesh[axis]))
    counts = np.searchsorted(space.shard_counts, space.divisors()).reshape(shape)
    # [x, outer, y, inner]: the shards before the step, for every y.
    before_step = np.broadcast_to(counts.transpose(1, 0, 2)[:, :, None], blocked.shape)
    return _Pattern(
        shape=shape,
        moves=moves,
        step=np.broadcast_to(step[:, None, :, None], blocked.shape).reshape(-1),
        counts_of_step=before_step.reshape(-1),
        blocked=blocked,
    )
