"""A global tensor's layout on a placement axis, in OneFlow's words.

`split(dim)`, `broadcast`, `partial_sum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import UsageError
from autopar.sharding.layout import Kind, Layout, P, Placement, R, S, format_layout, is_valid


@dataclass(frozen=True, slots=True)
class Sbp:
    """The layout on one axis.

    A call returns the object itself, as OneFlow allows for words without a dim.
    """

    placement: Placement

    def __call__(self) -> Sbp:
        return self

    def __repr__(self) -> str:
        kind = self.placement.kind
        if kind is Kind.SPLIT:
            return f"autopar.sbp.split(dim={self.placement.dim})"
        return "autopar.sbp.partial_sum" if kind is Kind.PARTIAL else "autopar.sbp.broadcast"


broadcast = Sbp(R)
partial_sum = Sbp(P)


def split(dim: int) -> Sbp:
    """A split on dim `dim`; a negative number counts from the end."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise UsageError(f"sbp.split takes a dim, not {dim!r}")
    return Sbp(S(dim))


Words = Sbp | Sequence[Sbp]


def layout_of_words(words: Words, axes: int, rank: int) -> Layout:
    """The layout of a tensor of `rank` dims from `words`, one for each axis of the placement."""
    given = (words,) if isinstance(words, Sbp) else tuple(words)
    if not all(isinstance(word, Sbp) for word in given):
        raise UsageError(
            f"sbp is {words!r}; it is autopar.sbp.split(dim), .broadcast or .partial_sum, or a "
            "sequence of them"
        )
    if len(given) != axes:
        raise UsageError(
            f"sbp has {len(given)} words, the placement has {axes} axes: give one for each"
        )
    placements = []
    for word in given:
        dim = word.placement.dim
        if word.placement.kind is Kind.SPLIT and not -rank <= dim < rank:
            raise UsageError(f"{word} is none of the {rank} dims of the tensor")
        placements.append(S(dim % rank) if word.placement.kind is Kind.SPLIT else word.placement)
    return tuple(placements)


def words_of_layout(layout: Layout) -> tuple[Sbp, ...]:
    """A layout in words.

    A value that is whole on every rank is broadcast, whatever its gradient is.
    """
    return tuple(Sbp(R if placement.kind is Kind.BROADCAST else placement) for placement in layout)


def require_even(layout: Layout, shape: Sequence[int], mesh: Sequence[int]) -> None:
    """Raise a `UsageError` unless all shards are of equal size."""
    if not is_valid(layout, shape, mesh):
        even = [dim for dim, size in enumerate(shape) if all(size % count == 0 for count in mesh)]
        nearest = f"split({even[0]})" if even else "broadcast"
        raise UsageError(
            f"a tensor of shape {list(shape)} does not divide evenly as [{format_layout(layout)}] "
            f"over {'x'.join(map(str, mesh))} ranks; "
            f"the nearest is sbp.{nearest}, or pad it"
        )
