"""Groups of dims of an operator's inputs that must have equal sizes, discovered by trying.

Every such group gets a size of its own. This separates dims that are equal by accident from those
that the operator needs equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.ir import Value
from autopar.runtime.proof import Sample

from .executed_calls import combinations, resized

SizedDim = tuple[int, int]
"""An input and one of its dims."""

MAX_ELEMENTS = 200_000
"""The most elements of all tensors of a tried call."""
MAX_LEAST = 48
"""Sizes are at least every integer attribute up to this: offsets and counts need room to act."""
MAX_GROUPS = 64
"""The number of groups of dims tried together with one dim."""


def spread(case: Sample, *, unit: int, seed: int) -> Sample:
    """The call at multiples of `unit`, where allowed.

    Each group of dims that must agree has its own size.
    """
    return _Spread(case, unit, seed).run()


class _Spread:
    """A call whose sizes are spread one group of dims after another."""

    def __init__(self, case: Sample, unit: int, seed: int) -> None:
        self.case = case
        self.current = case
        self.unit = unit
        self.seed = seed
        integers = set(integers_of(tuple(case.operator.attributes.values())))
        # A fresh size equal to an attribute would hide whether the operator ties the two.
        self.taken = {size for value in case.values for size in value.shape} | integers
        self.least = max((1, *(number for number in integers if number <= MAX_LEAST)))
        self.unchanged: set[int] = set()

    def run(self) -> Sample:
        """Spread larger sizes first, so that no index exceeds a table that has shrunk."""
        # Only dims of equal size can be required to agree.
        members: dict[int, list[SizedDim]] = {}
        for index, value in enumerate(self.case.values):
            for dim, size in enumerate(value.shape):
                members.setdefault(size, []).append((index, dim))
        for size in sorted(members, reverse=True):
            if size > 1:
                self._separate(size, members[size])
        for place in members.get(1, ()):
            self._grow(place)
        return self.current

    def _separate(self, size: int, places: Sequence[SizedDim]) -> None:
        """Give every group of dims that must agree a size of its own."""
        remaining = list(places)
        while remaining:
            # The smallest group that the operator accepts at another size must agree.
            for others in combinations(remaining[1:], MAX_GROUPS):
                group = (remaining[0], *others)
                # All dims of a size that fits already may keep it, if no other group has it.
                if (
                    len(group) == len(places)
                    and size % self.unit == 0
                    and size not in self.unchanged
                ):
                    self.unchanged.add(size)
                    break
                if any(self._set(group, fresh) for fresh in self._fresh(size)):
                    break
            else:
                group = (remaining[0],)
            remaining = [place for place in remaining if place not in group]

    def _grow(self, place: SizedDim) -> None:
        """Give a dim of size 1 a size of its own, or that of the dims it is broadcast to."""
        known = sorted({size for value in self.current.values for size in value.shape if size > 1})
        for fresh in (*self._fresh(1), *known):
            if self._set((place,), fresh):
                return

    def _fresh(self, size: int) -> Iterator[int]:
        """Unused multiples of the unit above all attributes.

        These are the smallest one, and the smallest of at least `size`.
        """
        for least in dict.fromkeys((self.least, max(size, self.least))):
            count = math.ceil(least / self.unit)
            while count * self.unit in self.taken:
                count += 1
            yield count * self.unit

    def _set(self, group: Sequence[SizedDim], size: int) -> bool:
        """Give a group of dims a size; whether the operator takes it."""
        shapes = [list(value.shape) for value in self.current.values]
        for index, dim in group:
            shapes[index][dim] = size
        if sum(math.prod(shape) for shape in shapes) > MAX_ELEMENTS:
            return False
        call = resized(self.current, shapes, self.seed)
        if call is None:
            return False
        if sum(tensor.size for tensor in call.graph.tensors.values()) > MAX_ELEMENTS:
            return False
        self.current = call
        self.taken.add(size)
        return True


def integers_of(value: Value) -> Iterator[int]:
    """The integers in an attribute."""
    if isinstance(value, tuple):
        for item in value:
            yield from integers_of(item)
    elif isinstance(value, int):
        yield value
