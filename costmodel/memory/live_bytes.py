"""Memories with a size, a birth and a last use, and the bytes alive at every moment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

STORED = -1
"""The memory of permanently stored tensors, which are counted apart."""
MISSING = -2
"""The memory of a place where there is no value."""

ACTIVATION = 0
GRADIENT = 1
BUFFER = 2
PASSING = 3
"""The kind of a memory that nothing else is known of."""
GATHERED = 4
KINDS = 5
CLOSED = 8
"""What is added to the kind of a memory that has been freed, although something refers to it."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Bytes alive at every moment, by their kind: arrays [moments].

    `activations`: values saved for the backward pass. `saved`: bytes that the forward pass of one
    micro-batch leaves to its backward pass. `gathered`: parameters in used layouts that differ from
    the stored ones. `moments`: the operator at work in every moment. `saved_of`:
    the share of `saved` that each of them is the first to keep.
    """

    activations: Floats
    gradients: Floats
    buffers: Floats
    passing: Floats
    gathered: Floats
    saved: float
    moments: Sequence[str]
    saved_of: Mapping[str, float]


@dataclass(slots=True)
class Memories:
    """Memories in the order in which they were made, and moments.

    `size` in bytes. `birth`, `death`: the moments of the first and the last use. `kind`: a number.
    `holders`: the places that refer to a gradient. `keeper`: the worker that first kept it, or -1.
    `source`: what it can be made from again, or `MISSING`. `moments`: the worker of each moment.
    `temporary_at`, `temporary`: moments and bytes of temporaries.
    """

    size: list[float] = field(default_factory=list)
    birth: list[int] = field(default_factory=list)
    death: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)
    keeper: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    moments: list[int] = field(default_factory=lambda: [0])
    temporary_at: list[int] = field(default_factory=list)
    temporary: list[float] = field(default_factory=list)


class LiveBytes:
    """The growing list of memories: sizes, kinds, and the moments of their birth and last use.

    `names`: whatever is at work in a moment, by its number in `memories`.
    """

    def __init__(self) -> None:
        self.forward_end = 0
        self.names = [""]
        self._numbers = {"": 0}
        self.memories = Memories()
        self.size = self.memories.size

    @property
    def now(self) -> int:
        """The number of the present moment."""
        return len(self.memories.moments) - 1

    def number_of(self, name: str) -> int:
        """The number of what is at work."""
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number

    def tick(self, name: str) -> None:
        """Go on to the next moment, in which `name` is at work."""
        self.memories.moments.append(self.number_of(name))

    def new(self, size: float, kind: int = PASSING) -> int:
        """Append a memory that is made in the present moment, and return its number."""
        memories = self.memories
        number = len(memories.size)
        now = len(memories.moments) - 1
        memories.size.append(size)
        memories.birth.append(now)
        memories.death.append(now)
        memories.kind.append(kind)
        memories.holders.append(0)
        memories.keeper.append(-1)
        memories.source.append(MISSING)
        return number

    def temporary(self, size: float) -> None:
        """Note bytes that are there in this moment alone."""
        self.memories.temporary_at.append(self.now)
        self.memories.temporary.append(size)

    def read(self, memory: int) -> None:
        # Released memory is not there, even if something still refers to it.
        if memory >= 0 and self.memories.kind[memory] < CLOSED:
            self.memories.death[memory] = self.now

    def mark(self, memory: int, kind: int) -> None:
        """Say of which kind a memory is; one that was released stays so."""
        released = self.memories.kind[memory] >= CLOSED
        self.memories.kind[memory] = kind + CLOSED * released

    def live(self, *, accumulating: bool) -> Live:
        """Return the sums at every moment.

        `accumulating`: a complete gradient has been added to a buffer and is gone.
        """
        memories = self.memories
        birth, death, kind = (
            np.array(numbers, dtype=np.int64)
            for numbers in (memories.birth, memories.death, memories.kind)
        )
        # What was released counts as what it was until then.
        kind %= CLOSED
        size = np.array(memories.size, dtype=np.float64)
        # Made in the forward pass and read in the backward pass: the value was saved.
        saved = (birth <= self.forward_end) & (self.forward_end < death)
        saved &= (kind == PASSING) | (kind == GATHERED)
        kind[saved & (kind == PASSING)] = ACTIVATION
        if accumulating:
            kind[kind == GRADIENT] = PASSING
        # Added up one by one, as sums of them are compared bit for bit.
        saved_of: dict[str, float] = {}
        for memory in np.flatnonzero(saved).tolist():
            # What no operator keeps for itself is held by a segment, from its maker on.
            keeper = memories.keeper[memory]
            keeper = memories.moments[birth[memory]] if keeper < 0 else keeper
            name = self.names[keeper]
            saved_of[name] = saved_of.get(name, 0.0) + memories.size[memory]
        passing_at = np.array(memories.temporary_at, dtype=np.int64)
        alive = self._alive(
            np.concatenate((kind, np.full(len(passing_at), PASSING))),
            np.concatenate((birth, passing_at)),
            np.concatenate((death, passing_at)),
            np.concatenate((size, np.array(memories.temporary, dtype=np.float64))),
        )
        return Live(
            activations=alive[ACTIVATION],
            gradients=alive[GRADIENT],
            buffers=alive[BUFFER],
            passing=alive[PASSING],
            gathered=alive[GATHERED],
            saved=math.fsum(saved_of.values()),
            moments=[self.names[number] for number in memories.moments],
            saved_of=saved_of,
        )

    def _alive(self, kind: Ints, birth: Ints, death: Ints, size: Floats) -> Floats:
        """Bytes of each kind at every moment: array [kinds, moments]."""
        # A memory that is read in the last moment is subtracted in the one behind it, as at the
        # moment of its last use it is still there.
        moments = self.now + 2
        at = kind * moments + np.stack((birth, death + 1))
        changes = np.bincount(
            at.T.ravel(), np.stack((size, -size)).T.ravel(), minlength=KINDS * moments
        )
        alive = np.cumsum(changes.reshape(KINDS, moments), axis=1)[:, :-1]
        return np.asarray(alive, dtype=np.float64)
