"""Loops of an operator, by cutting inputs along some dims at once.

A cut is right where the parts' outputs, joined along one dim, are the whole's (the loop goes
through), or where their sum, mean, maximum or minimum is (the loop is reduced; an addend then comes
once). Joining may be within equal parts of a dim, which makes the dim a compound.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.proof import Sample
from autopar.sharding.layout import Layout, R, S

from .executed_calls import combinations, outputs_of, outputs_of_shards

DEGREES = (2, 3)
TOLERANCE = 1e-9
MAX_TRIES = 400
"""The number of cuts tried with one dim as the first."""
MAX_ADDENDS = 16

Cut = tuple[int, int]
"""A dim and the number of equal parts within which it is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop of the operator: its dim in each input and output, and the reduction of a cut.

    A tensor without the loop has None.
    """

    size: int
    inputs: tuple[Cut | None, ...]
    outputs: tuple[Cut | None, ...]
    reduction: str | None = None
    addends: frozenset[int] = frozenset()

    def includes(self, other: Loop) -> bool:
        """Whether this loop is `other` with further inputs, whose values do not matter."""
        pairs = zip(self.inputs, other.inputs, strict=True)
        return self.outputs == other.outputs and all(
            theirs in (None, mine) for mine, theirs in pairs
        )

    @property
    def compound(self) -> bool:
        """Whether the loop is cut within parts somewhere."""
        return any(cut is not None and cut[1] > 1 for cut in (*self.inputs, *self.outputs))


_COMBINE: Mapping[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "sum": lambda parts: torch.stack(list(parts)).sum(0),
    "mean": lambda parts: torch.stack(list(parts)).mean(0),
    "max": lambda parts: functools.reduce(torch.maximum, parts),
    "min": lambda parts: functools.reduce(torch.minimum, parts),
}


def equal(value: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point():
        return torch.equal(value, wanted)
    return torch.allclose(value, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def _only_first(parts: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all ranks but the first contribute zeros.

    The first alone has the addends: the cut inputs then play no part.
    """
    return not any(bool((value != 0).any()) for outputs in parts[1:] for value in outputs)


def find_loops(case: Sample) -> list[Loop]:
    """All loops that can be cut, those of whole dims first."""
    return _Search(case).run()


class _Search:
    """The loops discovered so far, and how much of each input dim they explain."""

    def __init__(self, case: Sample) -> None:
        self.case = case
        self.whole = outputs_of(case)
        self.shapes = [tuple(value.shape) for value in case.values]
        self.loops: list[Loop] = []
        self.explained: dict[tuple[int, int], int] = {}

    def run(self) -> list[Loop]:
        """Cut every dim, whole dims first, then within ever more parts."""
        places = [
            (i, d)
            for i, shape in enumerate(self.shapes)
            for d, size in enumerate(shape)
            if size > 1
        ]
        # Dims of one loop mostly have one size; a compound has a multiple of it.
        for partners in (self._equal_sized, self._proportional):
            for index, dim in places:
                if (index, dim) not in self.explained:
                    self._first(self._cuts(index, dim, 1, partners(index, dim)))
        for index, dim in places:
            size = self.shapes[index][dim]
            for parts in (p for p in range(2, size) if size % p == 0):
                done = self.explained.get((index, dim), 1)
                # A loop outside explains the first factor of the size: go on within it.
                if done < size and parts % done == 0:
                    self._first(self._cuts(index, dim, parts, self._equal_sized(index, dim)))
        return self.loops

    def _first(self, cuts: Iterator[tuple[Cut | None, ...]]) -> None:
        """Enter the loop of the first cuts that have one."""
        loops = map(self._loop, itertools.islice(cuts, MAX_TRIES))
        loop = next((loop for loop in loops if loop is not None), None)
        if loop is None or any(loop.includes(old) for old in self.loops):
            return
        # A loop explains its part of each dim; what is left of it may belong to further loops.
        self.loops.append(loop)
        for index, cut in enumerate(loop.inputs):
            if cut is not None:
                place = (index, cut[0])
                self.explained[place] = max(self.explained.get(place, 1), cut[1] * loop.size)

    def _equal_sized(self, index: int, dim: int) -> list[list[int]]:
        """For every other input its dims of the same size that are not explained."""
        size = self.shapes[index][dim]
        return self._others(
            index, lambda other, place: other == size and place not in self.explained
        )

    def _proportional(self, index: int, dim: int) -> list[list[int]]:
        """For every other input its dims that are a multiple or a part of the size."""
        size = self.shapes[index][dim]
        return self._others(
            index, lambda other, _: other > 1 and (other % size == 0 or size % other == 0)
        )

    def _others(self, index: int, fits: Callable[[int, tuple[int, int]], bool]) -> list[list[int]]:
        """For every other input its dims that fit."""
        return [
            [d for d, other in enumerate(shape) if i != index and fits(other, (i, d))]
            for i, shape in enumerate(self.shapes)
        ]

    def _cuts(
        self, index: int, dim: int, parts: int, partners: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Cut | None, ...]]:
        """Cuts of one dim together with those of other inputs, the fewest first."""
        others = [i for i, dims in enumerate(partners) if dims]
        # Few inputs first: a dim that is cut needlessly in another input still gives the right
        # outputs.
        for chosen in combinations(others, MAX_TRIES):
            for dims in itertools.product(*(partners[i] for i in chosen)):
                at = dict(zip(chosen, dims, strict=True)) | {index: dim}
                yield tuple((at[i], parts) if i in at else None for i in range(len(self.shapes)))

    def _loop(self, cuts: tuple[Cut | None, ...]) -> Loop | None:
        """The loop to which these cuts belong, the same for all degrees that divide.

        None if there is none.
        """
        # All cut dims must divide: the loop has the same number of iterations in each of them.
        local = math.gcd(
            *(self.shapes[i][cut[0]] // cut[1] for i, cut in enumerate(cuts) if cut is not None)
        )
        degrees = [degree for degree in DEGREES if local % degree == 0]
        loops = {self._at(cuts, degree) for degree in degrees}
        return loops.pop() if len(loops) == 1 else None

    def _at(self, cuts: tuple[Cut | None, ...], degree: int) -> Loop | None:
        """The loop to which these cuts belong at one degree, with the fewest addends."""
        layouts: list[Layout] = [(S(*cut) if cut is not None else R,) for cut in cuts]
        free = [
            i
            for i, cut in enumerate(cuts)
            if cut is None and self.case.values[i].is_floating_point()
        ]
        for addends in combinations(free, MAX_ADDENDS):
            try:
                parts = outputs_of_shards(self.case, layouts, degree, frozenset(addends))
            except Exception:
                # Whatever the operator raises, it does not take these shards.
                return None
            results = [
                self._joined(index, [outputs[index] for outputs in parts])
                for index in range(len(self.whole))
            ]
            if results and all(result is not None for result in results):
                words = {result for result in results if isinstance(result, str)}
                if len(words) > 1 or (addends and (words != {"sum"} or _only_first(parts))):
                    continue
                outputs = tuple(result if isinstance(result, tuple) else None for result in results)
                return Loop(
                    size=self._size(cuts, outputs),
                    inputs=cuts,
                    outputs=outputs,
                    reduction=next(iter(words), None),
                    addends=frozenset(addends),
                )
            # Addends make a sum right, and integers are not summed.
            if not any(value.is_floating_point() for value in self.whole):
                return None
        return None

    def _size(self, cuts: Sequence[Cut | None], outputs: Sequence[Cut | None]) -> int:
        """The size of a loop: the smallest extent that its cuts have in a tensor."""
        shapes = (*self.shapes, *(tuple(output.shape) for output in self.whole))
        places = zip(shapes, (*cuts, *outputs), strict=True)
        return min(shape[cut[0]] // cut[1] for shape, cut in places if cut is not None)

    def _joined(self, index: int, parts: Sequence[Tensor]) -> Cut | str | None:
        """The way in which the parts' outputs make the whole; None where there is none.

        It is a cut of a dim, or the name of a reduction.
        """
        whole = self.whole[index]
        if len({part.shape for part in parts}) != 1:
            return None
        if parts[0].shape == whole.shape:
            # An output independent of the cut dim tells nothing about it.
            if not whole.is_floating_point() or all(equal(part, whole) for part in parts):
                return None
            return next(
                (name for name, combine in _COMBINE.items() if equal(combine(parts), whole)), None
            )
        if parts[0].dim() != whole.dim():
            return None
        sizes = zip(parts[0].shape, whole.shape, strict=True)
        changed = [dim for dim, (part, all_parts) in enumerate(sizes) if part != all_parts]
        if len(changed) != 1:
            return None
        (dim,) = changed
        size = parts[0].shape[dim]
        if size * len(parts) != whole.shape[dim]:
            return None
        for count in (count for count in range(1, size + 1) if size % count == 0):
            # Each part has a piece of each of `count` parts of the dim.
            pieces = [
                part.reshape(*part.shape[:dim], count, size // count, *part.shape[dim + 1 :])
                for part in parts
            ]
            if equal(torch.cat(pieces, dim + 1).flatten(dim, dim + 1), whole):
                return dim, count
        return None
