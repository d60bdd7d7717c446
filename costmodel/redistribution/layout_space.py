"""`LayoutSpace`: every layout of a tensor on a mesh, numbered, with arrays over all of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.sharding.layout import Kind, Layout, Placement


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutSpace:
    """Every combination of `kinds` over the axes of a mesh, numbered in mixed radix.

    The last axis runs fastest. Spaces are compared as objects, so that they are cheap keys:
    `layout_space` makes each space once.
    """

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
        return (
            np.indices((len(self.kinds),) * count).reshape(count, -1).T
            if count
            else np.zeros((1, 0), dtype=np.int64)
        )

    @functools.cached_property
    def shard_counts(self) -> NDArray[np.int64]:
        """The different numbers of shards into which layouts split the tensor, ascending."""
        return np.array(sorted(set(self.divisors().tolist())))

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
            # Splits of a dim nest from few parts to many: the shards so far must divide the parts.
            done = np.ones(len(digits), dtype=np.int64)
            levels = sorted(
                (kind.parts, i)
                for i, kind in enumerate(self.kinds)
                if kind.kind is Kind.SPLIT and kind.dim == dim
            )
            for parts, index in levels:
                degree = np.ones(len(digits), dtype=np.int64)
                for axis, size in enumerate(self.mesh):
                    degree[digits[:, axis] == index] *= size
                # A split over no device (degree 1) asks nothing of the dim.
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
