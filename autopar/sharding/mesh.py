"""`Mesh`: named axes over the devices, each bound to a level of the cluster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import UsageError

Axes = tuple[int, ...]
"""Positions of the mesh axes that a group of devices spans, in the order of the mesh."""
JOINED = " x "
"""Stands between the names of several axes that are one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a mesh: `size` devices, joined by the `level` of the cluster.

    They differ in this coordinate only.
    """

    name: str
    size: int
    level: str = "device"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError(f"mesh axis {self.name!r} has size {self.size}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Axes from the outermost (slowest link) to the innermost, with ranks in row-major order.

    >>> mesh = Mesh.of(node=2, gpu=4)
    >>> mesh.devices, mesh.groups((0,))[:2], mesh.groups((1,)), mesh.groups((0, 1))
    (8, ((0, 4), (1, 5)), ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 2, 3, 4, 5, 6, 7),))
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise UsageError(f"mesh axes need distinct names, not {', '.join(names)}")

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """A mesh from axis names and sizes, outermost first."""
        return cls(axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(axis.size for axis in self.axes)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    def index(self, name: str) -> int:
        """Position of the axis called `name`."""
        for position, axis in enumerate(self.axes):
            if axis.name == name:
                return position
        raise UsageError(
            f"the mesh has no axis {name!r}; its axes are "
            f"{', '.join(axis.name for axis in self.axes)}"
        )

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of `rank` on every axis."""
        out: list[int] = []
        for size in reversed(self.shape):
            rank, digit = divmod(rank, size)
            out.append(digit)
        return tuple(reversed(out))

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that differ in the coordinates `axes` only, each in row-major order of
        these.
        """
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        inside = [range(0, self.shape[axis] * strides[axis], strides[axis]) for axis in axes]
        outside = [
            range(0, n * s, s)
            for axis, (n, s) in enumerate(zip(self.shape, strides, strict=True))
            if axis not in axes
        ]
        steps = [sum(place) for place in itertools.product(*inside)]
        return tuple(
            tuple(sum(start) + step for step in steps) for start in itertools.product(*outside)
        )

    def name(self, axes: Axes) -> str:
        """The names of these axes."""
        return JOINED.join(self.axes[axis].name for axis in axes)

    def __str__(self) -> str:
        return " x ".join(f"{axis.name}={axis.size}" for axis in self.axes) or "one device"


def degree_of(axes: Axes, mesh: Sequence[int]) -> int:
    """The number of devices in a group over `axes` of a mesh of these sizes.

    >>> degree_of((0, 2), (2, 3, 4))
    8
    """
    return math.prod(mesh[axis] for axis in axes)


def axis_sets(mesh: Sequence[int]) -> tuple[Axes, ...]:
    """Every axis, then every set of two and more axes of several devices: the groups of ranks.

    >>> axis_sets((2, 1, 4))
    ((0,), (1,), (2,), (0, 2))
    """
    several = [axis for axis, size in enumerate(mesh) if size > 1]
    sets = (itertools.combinations(several, count) for count in range(2, len(several) + 1))
    # Axes of one device stay in as single ones: a tensor may have another kind on them before than
    # after, and the change is a step like any other.
    return (*((axis,) for axis in range(len(mesh))), *itertools.chain.from_iterable(sets))


def factorisations(devices: int, max_axes: int = 3) -> Iterator[tuple[int, ...]]:
    """Every ordered way to write `devices` as a product of one to `max_axes` factors above 1.

    One device gives `(1,)`.

    >>> list(factorisations(8))
    [(8,), (2, 4), (4, 2), (2, 2, 2)]
    """
    if devices == 1:
        yield (1,)
        return
    small = [d for d in range(1, math.isqrt(devices) + 1) if devices % d == 0]
    divisors = sorted({*small, *(devices // d for d in small)} - {1})
    for length in range(1, max_axes + 1):
        # The last factor follows from the others.
        for head in itertools.product(divisors, repeat=length - 1):
            product = math.prod(head)
            if devices % product == 0 and devices // product > 1:
                yield (*head, devices // product)
