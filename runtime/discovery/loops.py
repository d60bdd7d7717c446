"""Finds an operator's loops by cutting inputs along some dims at once and comparing the parts' outputs with the whole.

A cut is right where the parts' outputs, joined along one dim, are the whole's (the loop is kept), or where their sum,
mean, maximum or minimum is (the loop is reduced; an addend then comes once). Joining may be within equal parts of a
dim, which makes the dim a compound.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.sharding.layout import Layout, R, S

from ..proof import Sample
from .calls import combinations, outputs_of, outputs_of_shards

DEGREES = (2, 3)
TOLERANCE = 1e-9
MAX_TRIES = 400
"""The number of cuts tried with one dim as the first."""
MAX_ADDENDS = 16

Cut = tuple[int, int]
"""A dim and the number of equal parts within which it is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop of the operator: its dim in each input and output (None: nowhere), and the reduction a cut leaves."""

    size: int
    inputs: tuple[Cut | None, ...]
    outputs: tuple[Cut | None, ...]
    reduction: str | None = None
    addends: frozenset[int] = frozenset()

    def includes(self, other: Loop) -> bool:
        """Whether this loop is `other` with further inputs, whose values do not matter."""
        pairs = zip(self.inputs, other.inputs, strict=True)
        return self.outputs == other.outputs and all(theirs in (None, mine) for mine, theirs in pairs)

    @property
    def compound(self) -> bool:
        """Whether it is cut within parts somewhere."""
        return any(cut is not None and cut[1] > 1 for cut in (*self.inputs, *self.outputs))


_COMBINE: Mapping[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "sum": lambda parts: torch.stack(list(parts)).sum(0),
    "mean": lambda parts: torch.stack(list(parts)).mean(0),
    "max": lambda parts: functools.reduce(torch.maximum, parts),
    "min": lambda parts: functools.reduce(torch.minimum, parts),
}


def equal(found: Tensor, wanted: Tensor) -> bool:
    """Equality up to rounding."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    return torch.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def _only_first(parts: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all ranks but the first, which alone has the addends, contribute zeros: the cut inputs play no part."""
    return not any(bool((value != 0).any()) for outputs in parts[1:] for value in outputs)


def find_loops(case: Sample) -> list[Loop]:
    """All loops that can be cut, those of whole dims first."""
    return _Search(case).run()


class _Search:
    """The loops found so far, and how much of each input dim they explain."""

    def __init__(self, case: Sample) -> None:
        self.case = case
        self.whole = outputs_of(case)
        self.shapes = [tuple(value.shape) for value in case.values]
        self.loops: list[Loop] = []
        self.explained: dict[tuple[int, int], int] = {}

    def run(self) -> list[Loop]:
        places = [(i, d) for i, shape in enumerate(self.shapes) for d, size in enumerate(shape) if size > 1]
        for partners in (self._equal_sized, self._proportional):
            for index, dim in places:
                if (index, dim) not in self.explained:
                    self._first(self._cuts(index, dim, 1, partners(index, dim)))
        for index, dim in places:
            size = self.shapes[index][dim]
            for parts in (p for p in range(2, size) if size % p == 0):
                done = self.explained.get((index, dim), 1)
                if done < size and parts % done == 0:
                    self._first(self._cuts(index, dim, parts, self._equal_sized(index, dim)))
        return self.loops

    def _first(self, cuts: Iterator[tuple[Cut | None, ...]]) -> None:
        loop = next((loop for loop in map(self._loop, itertools.islice(cuts, MAX_TRIES)) if loop is not None), None)
        if loop is None or any(loop.includes(old) for old in self.loops):
            return
        self.loops.append(loop)
        for index, cut in enumerate(loop.inputs):
            if cut is not None:
                place = (index, cut[0])
                self.explained[place] = max(self.explained.get(place, 1), cut[1] * loop.size)

    def _equal_sized(self, index: int, dim: int) -> list[list[int]]:
        """For every other input its dims of the same size that are not explained."""
        size = self.shapes[index][dim]
        return self._others(index, lambda other, place: other == size and place not in self.explained)

    def _proportional(self, index: int, dim: int) -> list[list[int]]:
        """For every other input its dims that are a multiple or a part of the size."""
        size = self.shapes[index][dim]
        return self._others(index, lambda other, _: other > 1 and (other % size == 0 or size % other == 0))

    def _others(self, index: int, fits: Callable[[int, tuple[int, int]], bool]) -> list[list[int]]:
        return [[d for d, other in enumerate(shape) if i != index and fits(other, (i, d))] for i, shape in enumerate(self.shapes)]

    def _cuts(self, index: int, dim: int, parts: int, partners: Sequence[Sequence[int]]) -> Iterator[tuple[Cut | None, ...]]:
        """Cuts of one dim together with those of other inputs, the fewest first."""
        others = [i for i, dims in enumerate(partners) if dims]
        for chosen in combinations(others, MAX_TRIES):
            for dims in itertools.product(*(partners[i] for i in chosen)):
                at = dict(zip(chosen, dims, strict=True)) | {index: dim}
                yield tuple((at[i], parts) if i in at else None for i in range(len(self.shapes)))

    def _loop(self, cuts: tuple[Cut | None, ...]) -> Loop | None:
        """The loop to which these cuts belong, the same for all degrees that divide; None if there is none."""
        local = math.gcd(*(self.shapes[i][cut[0]] // cut[1] for i, cut in enumerate(cuts) if cut is not None))
        degrees = [degree for degree in DEGREES if local % degree == 0]
        found = {self._at(cuts, degree) for degree in degrees}
        return found.pop() if len(found) == 1 else None

    def _at(self, cuts: tuple[Cut | None, ...], degree: int) -> Loop | None:
        layouts: list[Layout] = [(S(*cut) if cut is not None else R,) for cut in cuts]
        free = [i for i, cut in enumerate(cuts) if cut is None and self.case.values[i].is_floating_point()]
        for addends in combinations(free, MAX_ADDENDS):
            try:
                parts = outputs_of_shards(self.case, layouts, degree, frozenset(addends))
            except Exception:  # whatever the operator raises, it does not take these shards
                return None
            results = [self._joined(index, [outputs[index] for outputs in parts]) for index in range(len(self.whole))]
            if results and all(result is not None for result in results):
                words = {result for result in results if isinstance(result, str)}
                if len(words) > 1 or (addends and (words != {"sum"} or _only_first(parts))):
                    continue
                outputs = tuple(result if isinstance(result, tuple) else None for result in results)
                size = min(
                    shape[cut[0]] // cut[1]
                    for shape, cut in zip((*self.shapes, *(tuple(o.shape) for o in self.whole)), (*cuts, *outputs), strict=True)
                    if cut is not None
                )
                return Loop(size=size, inputs=cuts, outputs=outputs, reduction=next(iter(words), None), addends=frozenset(addends))
            if not any(isinstance(value, Tensor) and value.is_floating_point() for value in self.whole):
                return None
        return None

    def _joined(self, index: int, parts: Sequence[Tensor]) -> Cut | str | None:
        """The way in which the parts' outputs make the whole: a cut of a dim, or the name of a reduction; None:
        neither.
        """
        whole = self.whole[index]
        if len({part.shape for part in parts}) != 1:
            return None
        if parts[0].shape == whole.shape:
            if not whole.is_floating_point() or all(equal(part, whole) for part in parts):
                return None  # an output independent of the cut dim tells nothing about it
            return next((name for name, combine in _COMBINE.items() if equal(combine(parts), whole)), None)
        changed = [d for d, (a, b) in enumerate(zip(parts[0].shape, whole.shape, strict=False)) if a != b]
        if parts[0].dim() != whole.dim() or len(changed) != 1 or parts[0].shape[changed[0]] * len(parts) != whole.shape[changed[0]]:
            return None
        dim, size = changed[0], parts[0].shape[changed[0]]
        for count in (count for count in range(1, size + 1) if size % count == 0):
            pieces = [part.reshape(*part.shape[:dim], count, size // count, *part.shape[dim + 1 :]) for part in parts]
            if equal(torch.cat(pieces, dim + 1).flatten(dim, dim + 1), whole):
                return dim, count
        return None
