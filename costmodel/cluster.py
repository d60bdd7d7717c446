"""`Cluster`: one kind of device, joined by levels of links from the inside out; seconds, bytes and per second throughout.

Devices are numbered so that neighbours share the innermost levels: with 8 devices a node, devices 0 to 7 are node 0.
A mesh numbers its ranks in row-major order, so its last axis varies over neighbouring devices.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import ClusterError, unknown
from autopar.ir import DTYPE_BYTES

from .measured import Measured
from .protocols import ALGORITHMS, Protocol

# Where a device has no figure of its own for a dtype, its arithmetic runs at the rate of this family.
FAMILIES: Mapping[str, str] = {
    **{dtype: "int" for dtype in DTYPE_BYTES if "int" in dtype or dtype == "bool"},
    **{dtype: dtype for dtype in ("float64", "float32", "float16", "bfloat16")},
    **{dtype: "float8" for dtype in DTYPE_BYTES if dtype.startswith("float8")},
    "complex64": "float32",
    "complex128": "float64",
}
FEATURES = ("in_switch",)
BACKENDS = ("nccl", "gloo")
ALONE = "device"


def _check(where: str, *, above: Mapping[str, float] | None = None, least: Mapping[str, float] | None = None) -> None:
    """Figures in `above` are positive and finite, those in `least` may be zero too."""
    for name, value in (above or {}).items():
        if not 0 < value < math.inf:
            raise ClusterError(f"{where}: {name} is {value}; it must be positive and finite")
    for name, value in (least or {}).items():
        if not 0 <= value < math.inf:
            raise ClusterError(f"{where}: {name} is {value}; it must be finite and not negative")


def _check_fractions(where: str, **fractions: float) -> None:
    for name, value in fractions.items():
        if not 0 < value <= 1:
            raise ClusterError(f"{where}: {name} is {value}; it must be above 0 and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one rank of a host.

    `peak`: FLOP/s by family of dtypes (float64, float32, float16, bfloat16, float8, int).
    `matmul_fraction`: how much of the peak large matrix products reach; `half_size`: the smallest dimension at which half of that is left.
    `memory_fraction`: how much of `memory_bandwidth` (B/s) a streaming operator reaches. `launch`: seconds per operator.
    `reserved`: bytes of `memory_capacity` that the framework and the communication library keep.
    `dispatch`: seconds of the host for each operator that it issues (it runs ahead of the device while kernels take longer).
    `units`: processors that compute the tiles of a matrix product (0: not known); `ragged_fraction`: what is left of the rate of products
    whose rows are no multiple of 16 bytes; `attention`: the fraction of the peak that a kernel reaches, by "flash2.forward".
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    matmul_fraction: float
    half_size: float
    memory_bandwidth: float
    memory_fraction: float
    memory_capacity: float
    launch: float
    reserved: float
    dispatch: float = 0.0
    units: float = 0.0
    ragged_fraction: float = 1.0
    attention: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        if not self.peak:
            raise ClusterError(f"{where}: no peak FLOP/s is given for any dtype")
        for family in self.peak:
            if family not in FAMILIES.values():
                raise ClusterError(f"{where}: " + unknown("dtype family", family, sorted(set(FAMILIES.values()))))
        rates = {f"peak of {family}": value for family, value in self.peak.items()}
        _check(
            where,
            above={**rates, "memory_bandwidth": self.memory_bandwidth, "memory_capacity": self.memory_capacity},
            least={"half_size": self.half_size, "launch": self.launch, "dispatch": self.dispatch, "reserved": self.reserved},
        )
        _check_fractions(
            where, matmul_fraction=self.matmul_fraction, memory_fraction=self.memory_fraction, ragged_fraction=self.ragged_fraction,
            **{f"attention of {kernel}": value for kernel, value in self.attention.items()},
        )  # fmt: skip
        if self.reserved >= self.memory_capacity:
            raise ClusterError(f"{where}: reserved is {self.reserved} B of {self.memory_capacity} B; nothing is left")

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`, one of `DTYPE_BYTES`."""
        if dtype not in FAMILIES:
            raise ClusterError(unknown("dtype", dtype, FAMILIES))
        family = FAMILIES[dtype]
        if family not in self.peak:
            raise ClusterError(f"device {self.name!r} has no peak FLOP/s for {dtype}; it has {', '.join(sorted(self.peak))}")
        return self.peak[family]

    def attention_fraction(self, kernel: str, direction: str) -> float:
        """The fraction of the peak that an attention kernel (flash1, flash2) reaches `direction` forward or backward."""
        name = f"{kernel}.{direction}"
        if name not in self.attention and self.attention:
            raise ClusterError(f"device {self.name!r}: " + unknown("attention kernel", name, self.attention))
        return self.attention.get(name, self.matmul_fraction)

    @property
    def usable_memory(self) -> float:
        """Bytes that a plan may fill."""
        return self.memory_capacity - self.reserved

    def shared(self, factor: float) -> Device:
        """The device with `factor` times the compute and memory: what a rank has when a host is shared by more or fewer ranks."""
        return replace(
            self,
            peak={family: value * factor for family, value in self.peak.items()},
            memory_bandwidth=self.memory_bandwidth * factor,
            memory_capacity=self.memory_capacity * factor,
            reserved=self.reserved * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Links that join `size` children (devices, or units of the level inside) into one unit.

    `latency`: seconds per message. `bandwidth`: B/s one way of one port (the NVLink bundle of a device, a NIC), of which `efficiency` is
    reached; `shared_by`: how many devices use one port. `duplex`: a port sends and receives at full rate at once.
    `peer_bandwidth`: B/s one way to one peer where devices are joined pair by pair (None: any part of `bandwidth` reaches any peer).
    `features`: of `FEATURES`. `protocols`: how the backend sends over it; an algorithm that none of them names runs at `latency` and
    `efficiency`. `copy_bandwidth`: B/s at which a device passes what it sends over this level through its own memory (None: at no cost).
    """

    name: str
    size: int
    latency: float
    bandwidth: float
    efficiency: float = 1.0
    shared_by: int = 1
    duplex: bool = True
    peer_bandwidth: float | None = None
    features: tuple[str, ...] = ()
    protocols: tuple[Protocol, ...] = field(default=(), hash=False)
    copy_bandwidth: float | None = None

    def __post_init__(self) -> None:
        where = f"level {self.name!r}"
        if not self.name.isidentifier() or self.name == ALONE:
            raise ClusterError(f"{where}: the name of a level is one word of letters, digits and _, other than {ALONE!r}")
        if self.size < 1 or self.shared_by < 1:
            raise ClusterError(f"{where}: size ({self.size}) and shared_by ({self.shared_by}) must be at least 1")
        others = {"peer_bandwidth": self.peer_bandwidth, "copy_bandwidth": self.copy_bandwidth}
        given = {name: value for name, value in others.items() if value is not None}
        _check(where, above={"bandwidth": self.bandwidth, **given}, least={"latency": self.latency})
        _check_fractions(where, efficiency=self.efficiency)
        for feature in self.features:
            if feature not in FEATURES:
                raise ClusterError(f"{where}: " + unknown("feature", feature, FEATURES))

    @property
    def plain(self) -> Protocol:
        """The protocol that the level's own latency and efficiency make."""
        return Protocol(name="plain", algorithms=ALGORITHMS, overhead=0.0, latency=self.latency, efficiency=self.efficiency)

    def protocols_for(self, algorithm: str) -> tuple[Protocol, ...]:
        """The protocols that an algorithm may run in."""
        return tuple(protocol for protocol in self.protocols if algorithm in protocol.algorithms) or (self.plain,)

    def rate(self, group: int, efficiency: float | None = None) -> float:
        """B/s one way that one device reaches in a group of `group`, when it has the port to itself."""
        bandwidth = self.bandwidth
        if self.peer_bandwidth is not None:
            bandwidth = min(bandwidth, self.peer_bandwidth * max(group - 1, 1))
        return bandwidth * (self.efficiency if efficiency is None else efficiency) * (1.0 if self.duplex else 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices of one kind and the `levels` that join them, inside out.

    `backend`: whose collectives run ("nccl" or "gloo"). `shared_host`: the devices are ranks of one host, which divide its compute, memory
    and links among them; the figures are those of one rank at the present number. `sources`: where each figure comes from, by
    "device.launch", "device.peak.float32", "nic.bandwidth". `measured`: collectives as calibrated, which go before the table of algorithms.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    backend: str = "nccl"
    shared_host: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    measured: tuple[Measured, ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ClusterError(f"cluster {self.name!r}: " + unknown("backend", self.backend, BACKENDS))
        names = [level.name for level in self.levels]
        if not names or len(set(names)) != len(names):
            raise ClusterError(f"cluster {self.name!r}: it needs at least one level, of distinct names, not [{', '.join(names)}]")
        for entry in self.measured:
            for part in entry.level.split("+"):
                self.level(part.partition(":")[0])

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(level.size for level in self.levels)

    @property
    def units(self) -> tuple[int, ...]:
        """Number of devices that one unit of each level holds: (8, 32) for 4 nodes of 8."""
        return tuple(itertools.accumulate((level.size for level in self.levels), lambda a, b: a * b))

    def level(self, name: str) -> Level:
        """The level called `name`."""
        for level in self.levels:
            if level.name == name:
                return level
        raise ClusterError(unknown("level", name, [level.name for level in self.levels]))

    def sized(self, devices: int) -> Cluster:
        """The cluster cut or grown to `devices`, any positive number.

        From the inside out each level keeps the largest divisor of what is left that is no larger than its size, and the outermost takes
        the rest: all units stay equal. With nodes of 8, 3072 devices are 384 nodes; 12 are 2 nodes of which 6 devices each are used; 7 are
        one node with 7 in use; 11 have no such divisor but 1, so they are one device in each of 11 nodes.
        """
        if devices < 1:
            raise ClusterError(f"cluster {self.name!r}: the number of devices is {devices}; it must be at least 1")
        if devices == self.devices:
            return self
        left = devices
        sizes = []
        for level in self.levels[:-1]:
            sizes.append(max(size for size in range(1, min(level.size, left) + 1) if left % size == 0))
            left //= sizes[-1]
        levels = tuple(replace(level, size=size) for level, size in zip(self.levels, (*sizes, left), strict=True))
        if not self.shared_host:
            return replace(self, levels=levels)
        factor = self.devices / devices
        levels = tuple(replace(level, bandwidth=level.bandwidth * factor) for level in levels)
        measured = tuple(entry.shared(factor) for entry in self.measured)
        return replace(self, levels=levels, device=self.device.shared(factor), measured=measured)


@functools.lru_cache(maxsize=4096)
def _bind(units: tuple[int, ...], names: tuple[str, ...], stride: int, size: int) -> str:
    """Text of the levels that an axis of `size` with `stride` spans."""
    if size == 1:
        return ALONE
    outer = next(i for i, unit in enumerate(units) if unit % (stride * size) == 0)
    inside = [max(unit // stride, 1) for unit in units[:outer]]  # members of a group that one unit holds, where it is a whole number
    even = all(max(unit, stride) % min(unit, stride) == 0 and size % held == 0 for unit, held in zip(units, inside, strict=False))
    if not even:
        return names[outer]
    branches = [after // before for before, after in itertools.pairwise([1, *inside, size])]
    spanned = [(name, count) for name, count in zip(names, branches, strict=False) if count > 1]
    return spanned[0][0] if len(spanned) == 1 else "+".join(f"{name}:{count}" for name, count in spanned)


def bind_axes(cluster: Cluster, sizes: tuple[int, ...]) -> tuple[str, ...] | None:
    """The levels that each axis of a mesh spans (outermost axis first), or None when the mesh has not as many devices as the cluster.

    A group on one level is bound to it by name. One that spans several is bound to "nvlink:8+nic:2": 8 members in each unit of the inner
    level, and 2 such units. A group that fills its units unevenly is bound to the outermost level that it crosses, as if no two members
    were nearer. An axis of size 1 is bound to "device".

    >>> from autopar.costmodel import load_cluster
    >>> cluster = load_cluster("dgx-h100").sized(64)
    >>> bind_axes(cluster, (8, 8)), bind_axes(cluster, (4, 16)), bind_axes(cluster, (4, 4, 4)), bind_axes(cluster, (3, 3))
    (('nic', 'nvlink'), ('nic', 'nvlink:8+nic:2'), ('nic', 'nvlink:2+nic:2', 'nvlink'), None)
    """
    if math.prod(sizes) != cluster.devices or min(sizes, default=1) < 1:
        return None
    names = tuple(level.name for level in cluster.levels)
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return tuple(_bind(cluster.units, names, stride, size) for stride, size in zip(strides, sizes, strict=True))


def parse_span(cluster: Cluster, text: str, group: int) -> tuple[tuple[Level, int], ...]:
    """The levels that a group of `group` devices spans, inside out, and its branches on each, from the text of `bind_axes`."""
    if group == 1:
        return ()
    if ":" not in text:
        return ((cluster.level(text), group),)
    try:
        parts = [(name, int(count)) for name, _, count in (part.partition(":") for part in text.split("+"))]
    except ValueError:
        raise ClusterError(f"{text!r} does not name levels; write one, or 'nvlink:8+nic:2'") from None
    if math.prod(count for _, count in parts) != group or min(count for _, count in parts) < 2:
        raise ClusterError(f"{text!r} does not describe a group of {group} devices")
    return tuple((cluster.level(name), count) for name, count in parts)
