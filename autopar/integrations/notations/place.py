"""The common arguments of all notations.

It knows the mesh and the tensor's rank, and refuses wrong text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.sharding.layout import Kind, Layout, Placement, R, S, format_layout
from autopar.sharding.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a layout: on `mesh`, of a tensor of `rank` dims."""

    mesh: Mesh
    rank: int

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mesh axes."""
        return tuple(axis.name for axis in self.mesh.axes)

    def require(self, layout: Layout) -> None:
        """Raise `RuleError` unless a layout has a placement for each axis, and splits dims that the
        tensor has.
        """
        if len(layout) != len(self.mesh.axes):
            count = len(layout)
            raise RuleError(
                f"layout [{format_layout(layout)}] has {count} placements, the mesh {self.mesh} "
                f"has {len(self.mesh.axes)}"
            )
        for placement in layout:
            if placement.kind is Kind.SPLIT and not 0 <= placement.dim < self.rank:
                raise RuleError(
                    f"layout [{format_layout(layout)}] splits dim {placement.dim} of a tensor of "
                    f"{self.rank} dims"
                )

    def from_dims(
        self, dims: Sequence[Sequence[int]], partial: Iterable[int] = (), *, text: str
    ) -> Layout:
        """The layout with dim i split over the mesh axes `dims[i]`, major first.

        `partial` axes hold partial sums.
        """
        placements: list[Placement] = [R] * len(self.mesh.axes)
        for dim, axes in enumerate(dims):
            if list(axes) != sorted(axes):
                order = ", ".join(self.names[axis] for axis in sorted(axes))
                raise RuleError(
                    f"{text!r}: splits of one dim nest in the order of the mesh axes; the nearest "
                    f"is ({order})"
                )
            for axis in axes:
                if placements[axis] != R:
                    raise RuleError(f"{text!r}: the mesh axis {self.names[axis]!r} splits two dims")
                placements[axis] = S(dim)
        for axis in partial:
            if placements[axis] != R:
                raise RuleError(
                    f"{text!r}: the mesh axis {self.names[axis]!r} is both split and partial"
                )
            placements[axis] = Placement(Kind.PARTIAL)
        layout = tuple(placements)
        self.require(layout)
        return layout


def whole_splits(layout: Layout, notation: str) -> None:
    """Refuse a split within parts, which the notation cannot say."""
    for placement in layout:
        if placement.kind is Kind.SPLIT and placement.parts > 1:
            raise RuleError(
                f"{notation} cannot say {placement} (each of {placement.parts} parts split): the "
                f"nearest is S{placement.dim}, "
                "another order of the elements; dtensor's _StridedShard can say it"
            )


def no_partial(layout: Layout, notation: str, nearest: str) -> None:
    """Refuse partial values where the notation has none."""
    if any(placement.kind is Kind.PARTIAL for placement in layout):
        raise RuleError(
            f"{notation} has no partial values, as in [{format_layout(layout)}]: {nearest}"
        )


def only_sums(layout: Layout, notation: str) -> None:
    """Refuse partial maxima and minima."""
    for placement in layout:
        if placement.kind is Kind.PARTIAL and placement.reduction != "sum":
            raise RuleError(
                f"{notation} knows partial sums only, not {placement}: the nearest is R, after the "
                f"{placement.reduction}"
            )


def axes_of(layout: Layout, rank: int) -> tuple[tuple[int, ...], ...]:
    """The mesh axes that split each dim, major first.

    >>> from autopar.sharding.layout import parse_layout
    >>> axes_of(parse_layout("S1 R S1"), 2)
    ((), (0, 2))
    """
    return tuple(
        tuple(a for a, p in enumerate(layout) if p.kind is Kind.SPLIT and p.dim == dim)
        for dim in range(rank)
    )


def as_tuple(words: Sequence[str]) -> str:
    """Words as Python writes a tuple of them.

    >>> as_tuple(["a", "b"]), as_tuple(["a"])
    ('(a, b)', '(a,)')
    """
    return f"({words[0]},)" if len(words) == 1 else f"({', '.join(words)})"
