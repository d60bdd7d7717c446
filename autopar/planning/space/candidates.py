"""The candidates of the outer search: devices, stages, the mesh of a stage, and micro-batches."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster, bind_axes
from autopar.file_limits import MICRO_BATCHES
from autopar.planning.model import FoldedModel, Request
from autopar.planning.model.restrictions import Space
from autopar.sharding.mesh import Axis, Mesh, factorisations

MAX_AXES = 3
"""The largest number of axes of a mesh."""
SMOOTH = 5
"""The largest prime factor of device counts that divide batches and layers well; others are tried
only if given.
"""
FEWER = 3
"""The number of smaller device counts to try."""
MAX_STAGES = 128
"""The largest number of pipeline stages."""
SMALL = 4
LARGE = 64
"""The most devices for which axes are tried in every order, and on the levels in every way."""
SHORT_PIPELINE = 8
"""The most stages for which fewer micro-batches than stages are tried.

That is faster where launches and messages cost more than the bubble.
"""
STRIDE = 1.9
"""The least factor between one number of micro-batches and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point of the outer search: equal stages, each on its own mesh, and micro-batches.

    `cluster`: exactly the devices of all stages.
    """

    cluster: Cluster
    stages: int
    mesh: Mesh
    micro_batches: int

    @property
    def devices(self) -> int:
        """Devices of all stages."""
        return self.stages * self.mesh.devices

    @property
    def place(self) -> tuple[int, int, Mesh]:
        """The key that candidates with other numbers of micro-batches share."""
        return self.cluster.devices, self.stages, self.mesh

    def __str__(self) -> str:
        stages = f"{self.stages} stages of " if self.stages > 1 else ""
        batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{stages}{self.mesh}{batches}"


def name_axes(cluster: Cluster, sizes: tuple[int, ...], levels: Iterable[str]) -> Mesh:
    """Return a mesh with axes named after the units that they join.

    An axis inside a node is called gpu (rank on CPUs), one across nodes node. Several of a name are
    numbered.
    """
    inner = cluster.levels[0].name
    unit = "gpu" if cluster.backend == "nccl" else "rank"

    def word_of(level: str) -> str:
        if level in (inner, "device"):
            return unit
        return "device" if ":" in level else "node"

    words = [word_of(level) for level in levels]
    names = [
        f"{word}{words[:i].count(word)}" if words.count(word) > 1 else word
        for i, word in enumerate(words)
    ]
    return Mesh(
        axes=tuple(
            Axis(name=n, size=s, level=level)
            for n, s, level in zip(names, sizes, levels, strict=True)
        )
    )


def meshes_for(
    request: Request, cluster: Cluster, stages: int = 1, max_axes: int = MAX_AXES
) -> Iterator[Mesh]:
    """Yield the meshes of a request's space, with each of the names that their axes may have."""
    space = request.space
    if space is None:
        yield from meshes(cluster, stages, max_axes)
        return
    # Axes of unlike kinds are no mirror images of each other.
    for mesh in meshes(cluster, stages, max_axes, mirrored=True):
        yield from named_meshes(mesh, space)


def named_meshes(mesh: Mesh, space: Space) -> Iterator[Mesh]:
    """Yield a mesh with each of the names that its axes may have."""
    every = space.names(len(mesh.axes))
    if mesh.devices == 1:
        # A single device splits nothing, whatever its axis is called.
        every = iter(()) if space.needed else itertools.islice(every, 1)
    for names in every:
        pairs = zip(mesh.axes, names, strict=True)
        yield Mesh(axes=tuple(replace(axis, name=name) for axis, name in pairs))


@functools.lru_cache(maxsize=256)
def meshes(
    cluster: Cluster, stages: int = 1, max_axes: int = MAX_AXES, *, mirrored: bool = False
) -> tuple[Mesh, ...]:
    """Return every factorisation of a stage's devices into at most `max_axes` axes.

    The axes are bound to levels of the cluster, of which the stages take the outermost. `mirrored`:
    with all mirror images.

    On more than `LARGE` devices an axis lies inside the innermost unit or joins whole units. The
    order of axes decides how splits of one dim nest, which matters little. So on more than `SMALL`
    devices, axes on one same level come only in ascending sizes.
    """
    bound_meshes = []
    for sizes in factorisations(cluster.devices // stages, max_axes):
        # None: the sizes do not fit the units of the cluster's levels.
        bound = bind_axes(cluster, (stages, *sizes))
        if bound is None:
            continue
        # "+" joins the levels of an axis that spans several.
        mixed = cluster.devices > LARGE and any("+" in level for level in bound[1:])
        dropped = not mirrored and cluster.devices > SMALL and _mirrored(sizes, bound[1:])
        if not mixed and not dropped:
            bound_meshes.append(name_axes(cluster, sizes, bound[1:]))
    return tuple(bound_meshes)


def _mirrored(sizes: tuple[int, ...], levels: tuple[str, ...]) -> bool:
    """Whether two neighbouring axes on one plain level have descending sizes.

    Their mirror image is kept instead.
    """
    pairs = zip(
        zip(sizes, levels, strict=True), zip(sizes[1:], levels[1:], strict=True), strict=False
    )
    return any(
        level == other and ":" not in level and size > following
        for (size, level), (following, other) in pairs
    )


def splits(mesh: Mesh, finer: Mesh) -> bool:
    """Whether `finer` is `mesh` with one of its two axes split in two."""
    # Meshes have at most three axes, so that a finer one of two axes has just three.
    sizes = finer.shape
    return len(sizes) == 3 and mesh.shape in (
        (sizes[0] * sizes[1], sizes[2]),
        (sizes[0], sizes[1] * sizes[2]),
    )


def splits_named(mesh: Mesh, finer: Mesh) -> bool:
    """Whether `finer` is `mesh` with an axis split, the other as before, and all names there."""
    if not splits(mesh, finer):
        return False
    first, last = mesh.axes
    names = {axis.name for axis in finer.axes}
    whole = last == finer.axes[-1] or first == finer.axes[0]
    return whole and {first.name, last.name} <= names


def device_counts(given: int) -> tuple[int, ...]:
    """Return the numbers of devices to try: all given ones, and some smaller numbers.

    The smaller ones are the largest power of two, and a few smooth ones if the given number has
    large prime factors.

    >>> device_counts(8), device_counts(24), device_counts(7)
    ((8,), (24, 16), (7, 6, 5, 4))
    """
    # Batches, heads and layers mostly divide by powers of two.
    power = 1 << (given.bit_length() - 1)
    smaller = [count for count in range(given - 1, given // 2, -1) if _is_smooth(count)][:FEWER]
    counts = {given, power, *(() if _is_smooth(given) else smaller)}
    return tuple(sorted(counts, reverse=True))


def halves(given: int) -> tuple[int, ...]:
    """The powers of two up to half of a number of devices.

    >>> halves(8), halves(7)
    ((4, 2, 1), (2, 1))
    """
    return tuple(
        1 << power for power in range(given.bit_length() - 1, -1, -1) if 2 << power <= given
    )


def _is_smooth(count: int) -> bool:
    for prime in range(2, SMOOTH + 1):
        while count % prime == 0:
            count //= prime
    return count == 1


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    # Divisors come in pairs around the square root.
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def stage_counts(devices: int, cuts: int) -> list[int]:
    """The possible numbers of equal stages, given the number of devices and the model's `cuts`."""
    return [count for count in divisors(devices) if count <= min(cuts + 1, MAX_STAGES)]


def micro_batch_counts(batch: int, stages: int, *, stride: float = STRIDE) -> list[int]:
    """The numbers of micro-batches to try, each at least `stride` times the one before.

    A long pipeline has at least as many micro-batches as stages; a single stage, or a few, may have
    any number.

    >>> micro_batch_counts(96, 4), micro_batch_counts(96, 16)
    ([1, 2, 4, 8, 16, 32, 96], [16, 32, 96])
    """
    counts: list[int] = []
    # A long pipeline with fewer micro-batches than stages mostly waits.
    least = min(stages, batch) if stages > SHORT_PIPELINE else 1
    for count in (n for n in divisors(batch) if n <= MICRO_BATCHES):
        if count >= least and (not counts or count >= stride * counts[-1]):
            counts.append(count)
    return counts


def micro_batches_to_try(
    folded: FoldedModel, stages: int, pinned: int | None = None, *, every: bool = False
) -> list[int]:
    """The numbers of micro-batches to try: the `pinned` one, some, or `every` possible one."""
    # Times change little between neighbouring numbers.
    stride = 1.0 if every else STRIDE
    counts = (
        [pinned] if pinned is not None else micro_batch_counts(folded.batch, stages, stride=stride)
    )
    return [count for count in counts if count == 1 or folded.divides(count)]
