"""Memories with a size, a birth and a last use, and the bytes alive at every moment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STORED = -1
"""The memory of permanently stored tensors, which are counted apart."""
ACTIVATION, GRADIENT, BUFFER, PASSING, GATHERED = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Bytes alive at every moment, by their kind.

    `activations`: values saved for the backward pass. `saved`: bytes that the forward pass of one
    micro-batch leaves to its backward pass. `gathered`: parameters in used layouts that differ from
    the stored ones. `moments`: the operator at work in every moment. `saved_of`:
    the share of `saved` that each of them is the first to keep.
    """

    activations: Sequence[float]
    gradients: Sequence[float]
    buffers: Sequence[float]
    passing: Sequence[float]
    gathered: Sequence[float]
    saved: float
    moments: Sequence[str]
    saved_of: Mapping[str, float]


class LiveBytes:
    """The growing list of memories: sizes, kinds, and the moments of their birth and last use."""

    def __init__(self) -> None:
        self.now = 0
        self.forward_end = 0
        self.moments = [""]
        self.size: list[float] = []
        self.birth: list[int] = []
        self.death: list[int] = []
        self.what: list[int] = []
        self.scratch: list[tuple[int, float]] = []
        self.keeper: dict[int, str] = {}  # a memory → the first operator that keeps it

    def tick(self, name: str) -> None:
        """Go on to the next moment, in which `name` is at work."""
        self.now += 1
        self.moments.append(name)

    def new(self, size: float, what: int = PASSING) -> int:
        self.size.append(size)
        self.birth.append(self.now)
        self.death.append(self.now)
        self.what.append(what)
        return len(self.size) - 1

    def read(self, memory: int) -> None:
        if memory != STORED:
            self.death[memory] = max(self.death[memory], self.now)

    def live(self, *, accumulating: bool) -> Live:
        """Return the sums at every moment.

        `accumulating`: a complete gradient has been added to a buffer and is gone.
        """
        # A memory that is read in the last moment is subtracted in the one behind it.
        moments = self.now + 2
        changes = [[0.0] * moments for _ in range(5)]
        saved_of: dict[str, float] = {}
        for memory, (size, birth, death, what) in enumerate(
            zip(self.size, self.birth, self.death, self.what, strict=True)
        ):
            # Made in the forward pass and read in the backward pass: the value was saved.
            if what in (PASSING, GATHERED) and birth <= self.forward_end < death:
                what = ACTIVATION if what == PASSING else what
                keeper = self.keeper.get(memory, self.moments[birth])
                saved_of[keeper] = saved_of.get(keeper, 0.0) + size
            elif what == GRADIENT and accumulating:
                what = PASSING
            changes[what][birth] += size
            # At the moment of its last use a memory is still there.
            changes[what][death + 1] -= size
        for moment, size in self.scratch:
            changes[PASSING][moment] += size
            changes[PASSING][moment + 1] -= size
        activations, gradients, buffers, passing, gathered = (
            list(itertools.accumulate(change))[:-1] for change in changes
        )
        return Live(
            activations=activations,
            gradients=gradients,
            buffers=buffers,
            passing=passing,
            gathered=gathered,
            saved=math.fsum(saved_of.values()),
            moments=self.moments,
            saved_of=saved_of,
        )
