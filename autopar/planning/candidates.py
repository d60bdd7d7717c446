"""What the outer search chooses from: how many devices, stages and micro-batches, and the mesh of a stage."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.costmodel import Cluster, bind_axes

from ..limits import MICRO_BATCHES
from ..sharding.mesh import Axis, Mesh, factorisations

MAX_AXES = 3
SMOOTH = 5
"""Device counts with no larger prime factor divide batches and layers well; others are tried only as they were given."""
FEWER = 3
"""How many smaller device counts are tried."""
MAX_STAGES = 128
SMALL, LARGE = 8, 64
"""Devices up to which axes are tried in every order, and every way to lay them over the levels is."""
SHORT_PIPELINE = 8
"""Stages up to which fewer micro-batches than stages are tried: where launches and messages cost more than the bubble, that is faster."""
STRIDE = 1.9
"""Numbers of micro-batches grow at least by this factor from one that is tried to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point of the outer search: `stages` equal stages on meshes of their own, and micro-batches; `cluster` has as many devices."""

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
        """What it has in common with candidates of other micro-batches."""
        return self.cluster.devices, self.stages, self.mesh

    def __str__(self) -> str:
        stages = f"{self.stages} stages of " if self.stages > 1 else ""
        batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{stages}{self.mesh}{batches}"


def name_axes(cluster: Cluster, sizes: tuple[int, ...], levels: Iterable[str]) -> Mesh:
    """A mesh whose axes are named after what they join: gpu (rank on CPUs) inside, node across, numbered when several."""
    inner = cluster.levels[0].name
    unit = "gpu" if cluster.backend == "nccl" else "rank"
    words = [unit if level in (inner, "device") else "node" if ":" not in level else "device" for level in levels]
    names = [f"{word}{words[:i].count(word)}" if words.count(word) > 1 else word for i, word in enumerate(words)]
    return Mesh(axes=tuple(Axis(name=n, size=s, level=level) for n, s, level in zip(names, sizes, levels, strict=True)))


@functools.lru_cache(maxsize=256)
def meshes(cluster: Cluster, stages: int = 1, max_axes: int = MAX_AXES) -> tuple[Mesh, ...]:
    """Every factorisation of a stage's devices with up to three axes, bound to levels; the stages are the outermost axis of all.

    On more than `LARGE` devices an axis lies inside the innermost unit or joins whole ones. Splits of one dim nest in the order of the
    axes, which matters little: on more than `SMALL` devices, of axes that lie on one level alone only the ascending sizes are kept.
    """
    found = []
    for sizes in factorisations(cluster.devices // stages, max_axes):
        bound = bind_axes(cluster, (stages, *sizes))
        if bound is None:
            continue
        mixed = cluster.devices > LARGE and any("+" in level for level in bound[1:])
        if not mixed and not (cluster.devices > SMALL and _mirrored(sizes, bound[1:])):
            found.append(name_axes(cluster, sizes, bound[1:]))
    return tuple(found)


def _mirrored(sizes: tuple[int, ...], levels: tuple[str, ...]) -> bool:
    """Whether two neighbouring axes on one plain level stand in descending order, so that their mirror image is kept instead."""
    pairs = zip(zip(sizes, levels, strict=True), zip(sizes[1:], levels[1:], strict=True), strict=False)
    return any(level == other and ":" not in level and size > following for (size, level), (following, other) in pairs)


def splits(mesh: Mesh, finer: Mesh) -> bool:
    """Whether a mesh is another with one of its two axes split in two."""
    sizes = finer.shape
    return len(sizes) == 3 and mesh.shape in ((sizes[0] * sizes[1], sizes[2]), (sizes[0], sizes[1] * sizes[2]))


def device_counts(given: int) -> tuple[int, ...]:
    """The number given; where it is no power of two the largest below it, and where it has large prime factors a few without.

    >>> device_counts(8), device_counts(24), device_counts(7)
    ((8,), (24, 16), (7, 6, 5, 4))
    """
    power = 1 << (given.bit_length() - 1)
    smaller = [count for count in range(given - 1, given // 2, -1) if _is_smooth(count)][:FEWER]
    found = {given, power, *(() if _is_smooth(given) else smaller)}
    return tuple(sorted(found, reverse=True))


def halves(given: int) -> tuple[int, ...]:
    """Powers of two up to half of a number of devices.

    >>> halves(8), halves(7)
    ((4, 2, 1), (2, 1))
    """
    return tuple(1 << power for power in range(given.bit_length() - 1, -1, -1) if 2 << power <= given)


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
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def stage_counts(devices: int, cuts: int) -> list[int]:
    """The numbers of equal stages that the devices and the places to cut the model allow."""
    return [count for count in divisors(devices) if count <= min(cuts + 1, MAX_STAGES)]


def micro_batch_counts(batch: int, stages: int, *, stride: float = STRIDE) -> list[int]:
    """Micro-batches worth trying: one stage, or a few, as few as fit, a long pipeline at least as many as stages; each `stride` times the
    last.

    >>> micro_batch_counts(96, 4), micro_batch_counts(96, 16)
    ([1, 2, 4, 8, 16, 32, 96], [16, 32, 96])
    """
    found: list[int] = []
    least = min(stages, batch) if stages > SHORT_PIPELINE else 1
    for count in (n for n in divisors(batch) if n <= MICRO_BATCHES):
        if count >= least and (not found or count >= stride * found[-1]):
            found.append(count)
    return found
