"""The choices that pins, a scheme, a loaded plan or a target of conversion allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Tensor
from autopar.sharding.analysis import Offer
from autopar.sharding.layout import Layout
from autopar.sharding.strategies import Strategies

Allow = Callable[[str, Offer, Strategies], NDArray[np.bool_]]
"""The mask of an operator's allowed strategies, given its name."""
AllowLayouts = Callable[[Tensor, tuple[Layout, ...]], NDArray[np.bool_]]
"""The mask of a parameter's allowed storage layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The allowed strategies, storage layouts and output layouts; all by default.

    `runs`: the most runs of equal components over the axes of a mesh, as a split of the batch on
    two axes and of the heads on the next are two. It limits all choices that are not pinned.
    """

    strategies: Allow | None = None
    storage: AllowLayouts | None = None
    outputs: Mapping[str, Layout] = field(default_factory=dict)
    runs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The part of the space of plans that is searched.

    `axes`: the kinds of mesh axes, the outermost first, each with its names; a mesh has at most one
    axis of a kind, and one of the names in `needed`. `zeros`, `recomputes`, `schedules`: the values
    to try. `stages`: the least number and the largest. `filled`: there are as many micro-batches as
    stages, at least.
    """

    axes: tuple[tuple[str, ...], ...]
    zeros: tuple[int, ...]
    recomputes: tuple[str, ...]
    schedules: tuple[str, ...]
    needed: frozenset[str] = frozenset()
    stages: tuple[int, float] = (1, math.inf)
    filled: bool = False

    def names(self, count: int) -> Iterator[tuple[str, ...]]:
        """The names that so many mesh axes may have."""
        for kinds in itertools.combinations(self.axes, count):
            for names in itertools.product(*kinds):
                if not self.needed or self.needed & {*names}:
                    yield names
