"""Prices of all redistributions of a tensor at once: shortest paths over every layout of the mesh.

    D[s, t] = min over axes a, kinds x of D[s, t with x on a] + step(x → t[a])        (Bellman, relaxed axis by axis)

A step's price is linear in the bytes of the shard; `autopar.sharding.redistribution.cheapest_chain` is the scalar
reference, used for the chains of the chosen plan.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.sharding.layout import Kind, Layout, Placement
from autopar.sharding.redistribution import STEP_PENALTY, Transfer, transfers

LinePrices = Callable[[str, int], tuple[tuple[float, float], ...]]
"""The lines (seconds, seconds per byte) whose minimum is a collective's time, given its name and its mesh axis."""


@dataclass(frozen=True, kw_only=True)
class LayoutSpace:
    """Every combination of `kinds` over the axes of a mesh, numbered in mixed radix (the last axis runs fastest)."""

    kinds: tuple[Placement, ...]
    mesh: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of layouts."""
        return int(len(self.kinds) ** len(self.mesh))

    def digits(self) -> NDArray[np.int64]:
        """Kind index of every layout on every axis: array [layouts, axes]."""
        return self._digits

    @functools.cached_property
    def _digits(self) -> NDArray[np.int64]:
        count = len(self.mesh)
        return np.indices((len(self.kinds),) * count).reshape(count, -1).T if count else np.zeros((1, 0), dtype=np.int64)

    @functools.cached_property
    def shard_counts(self) -> NDArray[np.int64]:
        """The different numbers of shards into which the layouts split the tensor, in ascending order."""
        return np.array(sorted(set(self.divisors().tolist())))

    @functools.cached_property
    def patterns(self) -> tuple[_Pattern, ...]:
        """The steps on each axis."""
        return tuple(_pattern(self, axis) for axis in range(len(self.mesh)))

    def codes(self, digits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the layouts with these kind indices: [n, axes] → [n]."""
        code = np.zeros(len(digits), dtype=np.int64)
        for axis in range(len(self.mesh)):
            code = code * len(self.kinds) + digits[:, axis]
        return code

    def layout(self, code: int) -> Layout:
        """The layout numbered `code`."""
        digits = []
        for _ in self.mesh:
            code, digit = divmod(code, len(self.kinds))
            digits.append(digit)
        return tuple(self.kinds[d] for d in reversed(digits))

    def code(self, layout: Layout) -> int:
        """The number of a layout."""
        value = 0
        for placement in layout:
            value = value * len(self.kinds) + self.kinds.index(placement)
        return value

    def valid(self, shape: Sequence[int]) -> NDArray[np.bool_]:
        """The layouts that give a tensor of `shape` shards of equal size: array [layouts]."""
        key = tuple(shape)
        if key not in self._known_valid:
            self._known_valid[key] = self._valid(key)
        return self._known_valid[key]

    @functools.cached_property
    def _known_valid(self) -> dict[tuple[int, ...], NDArray[np.bool_]]:
        return {}

    def _valid(self, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        digits = self.digits()
        ok = np.ones(len(digits), dtype=bool)
        for dim in {kind.dim for kind in self.kinds if kind.kind is Kind.SPLIT}:
            done = np.ones(len(digits), dtype=np.int64)
            levels = sorted((kind.parts, i) for i, kind in enumerate(self.kinds) if kind.kind is Kind.SPLIT and kind.dim == dim)
            for parts, index in levels:
                degree = np.ones(len(digits), dtype=np.int64)
                for axis, size in enumerate(self.mesh):
                    degree[digits[:, axis] == index] *= size
                ok &= (degree == 1) | ((parts % done == 0) & (shape[dim] % (parts * degree) == 0))
                done = np.where(degree > 1, parts * degree, done)
        return ok

    def divisors(self) -> NDArray[np.int64]:
        """The number of shards into which each layout splits the tensor."""
        digits = self.digits()
        split = np.array([kind.kind is Kind.SPLIT for kind in self.kinds])
        out = np.ones(len(digits), dtype=np.int64)
        for axis, size in enumerate(self.mesh):
            out[split[digits[:, axis]]] *= size
        return out


@functools.lru_cache(maxsize=4096)
def layout_space(kinds: tuple[Placement, ...], mesh: tuple[int, ...]) -> LayoutSpace:
    """The cached space of these kinds on a mesh of this shape."""
    return LayoutSpace(kinds=kinds, mesh=mesh)


Often = tuple[float, float]
"""The number of times that collectives to the value, and to its gradient, are issued."""


def distances(
    space: LayoutSpace, shape: Sequence[int], nbytes: int, price: LinePrices, *, gradient: bool, sources: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Seconds of the cheapest redistribution from each of `sources` to every layout: array [sources, layouts]."""
    return Distances(space, shape, nbytes, price, gradient=gradient).rows(sources)


class Distances:
    """Prices of all redistributions of a tensor, worked out for a source when it is first asked for.

    `wider`: bytes of the gradient for each byte of the value.
    """

    def __init__(
        self, space: LayoutSpace, shape: Sequence[int], nbytes: int, price: LinePrices, *, gradient: bool, often: Often = (1.0, 1.0),
        wider: float = 1.0,
    ) -> None:  # fmt: skip
        self.space, self.valid = space, space.valid(shape)
        often = often if gradient else (often[0], 0.0)
        self.steps = [_axis_costs(space, axis, nbytes, self.valid, price, often, wider) for axis in range(len(space.mesh))]
        self.known = np.zeros(space.size, dtype=bool)
        self.prices = np.empty((space.size, space.size))

    def rows(self, sources: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds from each of `sources` to every layout."""
        if not self.known[sources].all():
            wanted = np.zeros(self.space.size, dtype=bool)
            wanted[sources] = True
            fresh = np.flatnonzero(wanted & ~self.known)
            self.prices[fresh] = self._reach(fresh).T
            self.known[fresh] = True
        return self.prices[sources]

    def rows_from_storage(self, sources: NDArray[np.int64], share: LinePrices, nbytes: int, exposed: float = 1.0) -> NDArray[np.float64]:
        """Prices from a parameter's storage: leading R → B steps bear their `share` of a bucket, times `exposed`."""
        names = [kind.kind for kind in self.space.kinds]
        prices = self.rows(sources).copy()
        if Kind.BROADCAST not in names:
            return prices
        whole, part = names.index(Kind.REPLICATED), names.index(Kind.BROADCAST)
        digits, shards = self.space.digits()[sources], self.space.divisors()[sources]
        axes = range(len(self.space.mesh))
        for lead in (lead for count in axes for lead in itertools.combinations(axes, count + 1)):
            chosen = np.nonzero((digits[:, lead] == whole).all(axis=1))[0]
            after = digits[chosen].copy()
            after[:, lead] = part
            cost = np.zeros(len(chosen))
            for axis in lead:
                (alpha, beta) = share("all_reduce", axis)[-1]
                cost += exposed * (alpha + beta * nbytes / shards[chosen]) + STEP_PENALTY
            prices[chosen] = np.minimum(prices[chosen], cost[:, None] + self.rows(self.space.codes(after)))
        return prices

    def _reach(self, sources: NDArray[np.int64]) -> NDArray[np.float64]:
        """Array [layouts, sources]: relaxed axis by axis until no axis changes anything."""
        space = self.space
        size, axes = len(space.kinds), len(space.mesh)
        reach = np.full((space.size, len(sources)), math.inf)
        reach[sources, np.arange(len(sources))] = 0.0
        reach[~self.valid] = math.inf
        # No chain makes a whole value partial only to sum it again.
        partial = np.array([kind.kind is Kind.PARTIAL for kind in space.kinds])
        closed = [np.where(partial[space.digits()[sources, a]], 0.0, math.inf) for a in range(axes)]
        axis, settled = 0, 0
        while settled < axes:
            before = reach.copy()
            grid = reach.reshape(size**axis, size, size ** (axes - axis - 1), len(sources))
            for x, costs in enumerate(self.steps[axis]):
                origin = grid[:, x] + closed[axis] if partial[x] else grid[:, x]
                np.minimum(grid, origin[:, None] + costs, out=grid)
            settled = settled + 1 if np.array_equal(before, reach) else 0
            axis = (axis + 1) % axes
        return reach


def _axis_costs(
    space: LayoutSpace, axis: int, nbytes: int, valid: NDArray[np.bool_], price: LinePrices, often: Often, wider: float
) -> NDArray[np.float64]:
    """Prices of the steps on `axis` from kind x to kind y, by the other axes' kinds: array [x, outer, y, inner, 1].

    Infinite: a step that no layout may take, or not this one.
    """
    pattern = space.patterns[axis]
    sizes = nbytes / space.shard_counts
    ahead = _sent(pattern, axis, sizes, price)
    back = ahead if wider == 1.0 else _sent(pattern, axis, wider * sizes, price)
    by_count = STEP_PENALTY + often[0] * ahead[pattern.ahead] + often[1] * back[pattern.back]
    cost = by_count[pattern.step, pattern.counts_of_step].reshape(pattern.blocked.shape) + pattern.blocked
    cost[:, ~valid.reshape(pattern.shape)] = math.inf  # the reached layout must divide
    return cost[..., None]


def _sent(pattern: _Pattern, axis: int, sizes: NDArray[np.float64], price: LinePrices) -> NDArray[np.float64]:
    """Seconds of every transfer for every number of shards; the last row: nothing is sent."""
    seconds = np.zeros((len(pattern.transfers) + 1, len(sizes)))
    for row, transfer in enumerate(pattern.transfers):
        moved = transfer.scale * sizes
        seconds[row] = functools.reduce(np.minimum, [alpha + beta * moved for alpha, beta in price(transfer.collective, axis)])
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pattern:
    """The part of the steps on one axis that all tensors share; layouts are laid out as [outer, kind, inner].

    `transfers`: the collectives that occur. `ahead`, `back`: the collective of each kind of step, by number (-1: none).
    `step`: the kind of step of every pair of kinds x, y. `counts_of_step`: for every pair and every layout [outer,
    inner] before it, the number of shards as an index into `LayoutSpace.shard_counts`. `blocked`: infinite where
    nesting forbids the step: array [x, outer, y, inner].
    """

    shape: tuple[int, int, int]
    transfers: tuple[Transfer, ...]
    ahead: NDArray[np.int64]
    back: NDArray[np.int64]
    step: NDArray[np.int64]
    counts_of_step: NDArray[np.int64]
    blocked: NDArray[np.float64]


def _pattern(space: LayoutSpace, axis: int) -> _Pattern:
    size, axes = len(space.kinds), len(space.mesh)
    shape = (size**axis, size, size ** (axes - axis - 1))
    inner = space.digits()[:, axis + 1 :].reshape(*shape, -1)
    found: dict[Transfer, int] = {}
    pairs: dict[tuple[int, int], int] = {}
    step = np.zeros((size, size), dtype=np.int64)
    blocked = np.full((size, shape[0], size, shape[2]), math.inf)
    for x, before in enumerate(space.kinds):
        for y, after in enumerate(space.kinds):
            same_dim = before.kind is Kind.SPLIT and after.kind is Kind.SPLIT and before.dim == after.dim
            if x == y or same_dim or (after.kind is Kind.PARTIAL and after.reduction != "sum"):
                continue
            blocked[x, :, y] = 0.0
            for index, kind in ((x, before), (y, after)):
                if kind.kind is Kind.SPLIT and axis + 1 < axes:
                    blocked[x, :, y][(inner[:, x] == index).any(axis=-1)] = math.inf
            ahead, back = (-1 if t is None else found.setdefault(t, len(found)) for t in transfers(before, after, space.mesh[axis]))
            step[x, y] = pairs.setdefault((ahead, back), len(pairs))
    counts = np.searchsorted(space.shard_counts, space.divisors()).reshape(shape)
    # [x, outer, y, inner]: the shards before the step, for every y.
    before_step = np.broadcast_to(counts.transpose(1, 0, 2)[:, :, None], blocked.shape)
    numbers = np.array(list(pairs) or [(-1, -1)], dtype=np.int64)
    return _Pattern(
        shape=shape, transfers=tuple(found), ahead=numbers[:, 0], back=numbers[:, 1],
        step=np.broadcast_to(step[:, None, :, None], blocked.shape).reshape(-1), counts_of_step=before_step.reshape(-1), blocked=blocked,
    )  # fmt: skip
