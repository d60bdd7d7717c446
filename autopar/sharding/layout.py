"""`Layout`: for each mesh axis, how a tensor's value and its gradient lie on that axis.

    kind    value        gradient
    S(d)    split on d   split on d
    R       replicated   replicated
    B       replicated   partial sum
    P(op)   partial      replicated

A split may address the inner part of a compound dim: `S2/3` reads dim 2 as 3 equal parts and splits
each of them, as a column split of a fused query-key-value projection needs; with `parts = 1` it is
the ordinary contiguous split. On one dim, splits with equal `parts` nest in the order of the mesh
axes (the first is the outermost).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

from autopar.errors import RuleError


class Kind(StrEnum):
    """The four kinds of a tensor on one mesh axis."""

    SPLIT = "S"
    REPLICATED = "R"
    BROADCAST = "B"
    PARTIAL = "P"


REDUCTIONS = ("sum", "max", "min")


@dataclass(frozen=True, slots=True)
class Placement:
    """The kind on one mesh axis: `dim` and `parts` for a split, `reduction` for a partial value."""

    kind: Kind
    dim: int = -1
    parts: int = 1
    reduction: str = "sum"
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Layouts are keys in every step of a plan, so the hash is made once. It is made of numbers,
        # of which every process makes the same.
        letters = (self.kind.value + self.reduction).encode()
        object.__setattr__(self, "_hash", hash((self.dim, self.parts, *letters)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if self.kind is Kind.SPLIT:
            return f"S{self.dim}" + (f"/{self.parts}" if self.parts > 1 else "")
        if self.kind is Kind.PARTIAL and self.reduction != "sum":
            return f"P({self.reduction})"
        return str(self.kind.value)


R = Placement(Kind.REPLICATED)
B = Placement(Kind.BROADCAST)
P = Placement(Kind.PARTIAL)


@cache
def S(dim: int, parts: int = 1) -> Placement:
    """Split on `dim`, read as `parts` equal parts that are each split."""
    return Placement(Kind.SPLIT, dim, parts)


Layout = tuple[Placement, ...]

_TOKEN = re.compile(r"S(?P<dim>\d+)(?:/(?P<parts>[1-9]\d*))?|(?P<whole>[RB])|P(?:\((?P<op>\w+)\))?")


def parse_layout(text: str) -> Layout:
    """Read a layout, one placement for each mesh axis in order.

    >>> [str(p) for p in parse_layout("S0 S2/3 P")]
    ['S0', 'S2/3', 'P']
    """
    placements: list[Placement] = []
    for token in text.split():
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise RuleError(
                f"layout {text!r}: {token!r} is none of S<dim>, S<dim>/<parts>, R, B, P, P(max), "
                "P(min)"
            )
        if match["dim"] is not None:
            placements.append(S(int(match["dim"]), int(match["parts"] or 1)))
        elif match["whole"]:
            placements.append(R if match["whole"] == "R" else B)
        else:
            reduction = match["op"] or "sum"
            if reduction not in REDUCTIONS:
                raise RuleError(
                    f"layout {text!r}: unknown reduction {reduction!r}; valid are "
                    f"{', '.join(REDUCTIONS)}"
                )
            placements.append(Placement(Kind.PARTIAL, reduction=reduction))
    return tuple(placements)


def format_layout(layout: Layout) -> str:
    """Write a layout; `parse_layout` reads it back.

    >>> format_layout((S(0), R))
    'S0 R'
    """
    return " ".join(str(placement) for placement in layout)


def split_levels(layout: Layout, dim: int, mesh: Sequence[int]) -> list[tuple[int, int]]:
    """The splits of `dim` as (parts, degree), outermost level first.

    Axes with equal parts are one level.
    """
    degrees: dict[int, int] = {}
    for axis, placement in enumerate(layout):
        # An axis of one device splits nothing, so it makes no level.
        if placement.kind is Kind.SPLIT and placement.dim == dim and mesh[axis] > 1:
            degrees[placement.parts] = degrees.get(placement.parts, 1) * mesh[axis]
    return sorted(degrees.items())


def is_valid(layout: Layout, shape: Sequence[int], mesh: Sequence[int]) -> bool:
    """Whether every shard is equal in size: each level divides what the levels outside it leave.

    >>> is_valid((S(0), S(0)), (8,), (2, 4)), is_valid((S(0),), (6,), (4,))
    (True, False)
    >>> is_valid((S(0, 3),), (6,), (2,))
    True
    """
    if len(layout) != len(mesh):
        return False
    for dim in {p.dim for p in layout if p.kind is Kind.SPLIT}:
        if dim >= len(shape):
            return False
        done = 1
        for parts, degree in split_levels(layout, dim, mesh):
            # Each shard of the outer levels must hold a whole number of parts, or a part would lie
            # on two ranks.
            if parts % done or shape[dim] % (parts * degree):
                return False
            done = parts * degree
    return True


def local_shape(layout: Layout, shape: Sequence[int], mesh: Sequence[int]) -> tuple[int, ...]:
    """Shape of the shard on one device.

    >>> local_shape((S(0), S(2)), (8, 5, 12), (2, 4))
    (4, 5, 3)
    """
    out = list(shape)
    for axis, placement in enumerate(layout):
        if placement.kind is Kind.SPLIT:
            # The layout is taken to be valid, so that the division leaves no rest.
            out[placement.dim] //= mesh[axis]
    return tuple(out)


def local_parts(layout: Layout, axis: int, mesh: Sequence[int]) -> int:
    """The number of equal parts in a shard's dim at the level of `axis`.

    It is `parts` divided by the splits outside that level.
    """
    own = layout[axis]
    outside = math.prod(
        mesh[a]
        for a, p in enumerate(layout)
        if p.kind is Kind.SPLIT and p.dim == own.dim and p.parts < own.parts
    )
    return own.parts // outside


def replicated(axes: int) -> Layout:
    """The layout that keeps the whole tensor on every device."""
    return (R,) * axes
