"""`Cluster`: devices joined by levels of links from the inside out, of one kind or in pools; in seconds and bytes.

Devices are numbered so that neighbours share the innermost levels: with 8 devices a node, devices 0 to 7 are node 0.
A mesh numbers its ranks in row-major order, so its last axis varies over neighbouring devices.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import ClusterError, unknown

from ..device import Device
from ..device.prices import large_product_rate
from .level import ALONE, Level
from .measured import Measured
from .source import Source

BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices of one kind and the `levels` that join them, inside out; or several such clusters, its pools.

    `backend`: the library of its collectives ("nccl" or "gloo"). `shared_host`: the devices are ranks of one host,
    which divide its compute, memory and links; the figures are those of one rank at the present number. `cores`: of the
    host for each rank; below 1, a waiting rank leaves its share to the others (None: each rank has its own). `sources`:
    the source of each figure, by "device.launch", "device.peak.float32", "nic.bandwidth". `measured`: calibrated
    collectives, which overrule the table of algorithms. `joined`: the pools of a cluster of several kinds of devices
    (`join`); `device` and `levels` are then those of a mesh over all pools.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    backend: str = "nccl"
    shared_host: bool = False
    cores: float | None = None
    sources: Mapping[str, Source] = field(default_factory=dict, hash=False)
    measured: tuple[Measured, ...] = field(default=(), hash=False)
    joined: tuple[Cluster, ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ClusterError(f"cluster {self.name!r}: " + unknown("backend", self.backend, BACKENDS))
        names = [level.name for level in self.levels]
        if not names or len(set(names)) != len(names):
            raise ClusterError(f"cluster {self.name!r}: it needs at least one level, of distinct names, not [{', '.join(names)}]")
        for entry in self.measured:
            for part in entry.level.split("+"):
                self.level(part.partition(":")[0])

    def __hash__(self) -> int:
        # Of few fields: caches ask for it very often.
        return hash((self.name, self.device.name, tuple([level.size for level in self.levels])))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod([level.size for level in self.levels])

    @property
    def units(self) -> tuple[int, ...]:
        """Number of devices that one unit of each level holds: (8, 32) for 4 nodes of 8."""
        return tuple(itertools.accumulate((level.size for level in self.levels), lambda a, b: a * b))

    @property
    def pools(self) -> tuple[Cluster, ...]:
        """The cluster's pools, each of one kind of device, in their order; a cluster of one kind is its own pool."""
        return self.joined or (self,)

    @property
    def inventory(self) -> str:
        """Text of how many of which devices it has: "16 x A100-SXM4-40GB + 8 x H100-SXM5-80GB"."""
        return " + ".join(f"{pool.devices} x {pool.device.name}" for pool in self.pools)

    @property
    def starts(self) -> tuple[int, ...]:
        """Number of the first device of each pool."""
        return tuple(itertools.accumulate((pool.devices for pool in self.pools[:-1]), initial=0))

    @property
    def core_share(self) -> float:
        """The share of a core that a rank has while all ranks of its host are at work: 1 where each has one of its own."""
        return 1.0 if self.cores is None else min(self.cores, 1.0)

    def level(self, name: str) -> Level:
        """The level called `name`."""
        for level in self.levels:
            if level.name == name:
                return level
        raise ClusterError(unknown("level", name, [level.name for level in self.levels]))

    def sized(self, devices: int) -> Cluster:
        """The cluster cut or grown to `devices`, any positive number.

        From the inside out each level takes the largest divisor of the remaining number that it has room for, and the
        outermost level takes the rest, so all units stay equal. With nodes of 8, 3072 devices are 384 nodes; 12 are 2
        nodes with 6 devices in use each; 7 are one node with 7 in use; 11 have no such divisor but 1, so they are one
        device in each of 11 nodes. A cut cluster has no more nodes than before: if equal units would need more, its
        first devices are taken (`part`), so 11 of 16 are a node of 8 and 3 more. Pools are cut from the last one on.
        They do not grow, since nothing says which of them should.
        """
        if devices < 1:
            raise ClusterError(f"cluster {self.name!r}: the number of devices is {devices}; it must be at least 1")
        if devices == self.devices:
            return self
        if self.joined:
            return _cut(self, devices)
        return _sized(self, devices)

    def part(self, start: int, count: int) -> Cluster:
        """The `count` devices from number `start` on while the rest is in use as well: the devices of a pipeline stage.

        `sized` describes a cluster of another size; a part keeps each device's share of its host and of a shared port.
        A unit of u devices is filled in blocks of g = gcd(start, count, u), none of which crosses a unit. Blocks count
        as members of one unit, and devices of different blocks as if they only shared the unit outside. With nodes of
        8, devices 0 to 11 are 3 blocks of 4 over the network. Devices of several pools are a part of the mesh over all.
        """
        if start < 0 or count < 1 or start + count > self.devices:
            raise ClusterError(f"cluster {self.name!r}: of {self.devices} devices there are no {count} from number {start} on")
        if count == self.devices:
            return self
        for first, pool in zip(self.starts, self.joined, strict=False):
            if first <= start and start + count <= first + pool.devices:
                return pool.part(start - first, count)
        sizes, before = [], 1
        for unit in self.units:
            inside = start // unit == (start + count - 1) // unit
            block = count if inside else math.gcd(start, count, unit)
            sizes.append(block // before)
            before = block
        return _part(self, tuple(sizes))


@functools.lru_cache(maxsize=4096)
def _sized(cluster: Cluster, devices: int) -> Cluster:
    """The cluster, of one kind of device, with another number of devices."""
    left, levels = devices, []
    for level in cluster.levels[:-1]:
        room = max(level.size, level.slots)
        size = max(size for size in range(1, min(room, left) + 1) if left % size == 0)
        levels.append(replace(level, size=size, slots=room if size < room else 0))
        left //= size
    if devices < cluster.devices and left > cluster.levels[-1].size:
        return cluster.part(0, devices)
    levels.append(replace(cluster.levels[-1], size=left))
    if not cluster.shared_host:
        return replace(cluster, levels=tuple(levels))
    factor = cluster.devices / devices
    shared = tuple(replace(level, bandwidth=level.bandwidth * factor) for level in levels)
    measured = tuple(entry.shared(factor) for entry in cluster.measured)
    cores = None if cluster.cores is None else cluster.cores * factor
    return replace(cluster, levels=shared, device=cluster.device.shared(factor), measured=measured, cores=cores)


@functools.lru_cache(maxsize=4096)
def _part(cluster: Cluster, sizes: tuple[int, ...]) -> Cluster:
    """The cluster with levels of these sizes; a port gives each device as much as in the whole cluster."""
    count = math.prod(sizes)
    levels, held = [], 1
    for level, size, unit in zip(cluster.levels, sizes, (1, *cluster.units), strict=False):
        shares = min(level.shared_by, held) / min(level.shared_by, unit, count)
        levels.append(replace(level, size=size, bandwidth=level.bandwidth * shares, slots=0))
        held *= size
    return replace(cluster, levels=tuple(levels), joined=())


def _cut(cluster: Cluster, devices: int) -> Cluster:
    """The first pools of a cluster that hold `devices`, with the last of them cut."""
    if devices > cluster.devices:
        raise ClusterError(f"cluster {cluster.name!r} has {cluster.inventory}, not {devices} devices; its file can add some")
    kept = [pool for first, pool in zip(cluster.starts, cluster.pools, strict=True) if first < devices]
    kept[-1] = kept[-1].sized(devices - cluster.starts[len(kept) - 1])
    if len(kept) == 1:
        return replace(kept[0], name=cluster.name)
    return join(cluster.name, kept, between=cluster.levels[-1], sources=cluster.sources)


def join(name: str, pools: Sequence[Cluster], *, between: Level, sources: Mapping[str, Source] | None = None) -> Cluster:
    """A cluster of two or more pools whose nodes are joined by `between` (its size is that of the cluster).

    A mesh over devices of several pools runs at the pace of the slowest pool. Its `device` is the one with the slowest
    matrix products, with the least memory and memory bandwidth of all; inside its nodes it has the slowest links.
    """
    names = {level.name for pool in pools for level in pool.levels}
    if len(pools) < 2 or any(pool.joined for pool in pools):
        raise ClusterError(f"cluster {name!r}: it needs two or more pools, each of one kind of device")
    if len({pool.backend for pool in pools}) > 1:
        raise ClusterError(f"cluster {name!r}: its pools have different backends ({', '.join(pool.backend for pool in pools)})")
    if between.name in names:
        raise ClusterError(f"cluster {name!r}: the level between its pools needs a name of its own, not {between.name!r}")
    inner = replace(min((pool.levels[0] for pool in pools), key=lambda level: level.rate(2)), slots=0)
    held = math.gcd(*(pool.units[0] for pool in pools), *(pool.devices for pool in pools))
    nodes = sum(pool.devices for pool in pools) // held
    return Cluster(
        name=name, device=_slowest(name, [pool.device for pool in pools]), backend=pools[0].backend, sources=sources or {},
        levels=(replace(inner, size=held), replace(between, size=nodes)), joined=tuple(pools),
    )  # fmt: skip


def _slowest(name: str, devices: Sequence[Device]) -> Device:
    """A device with the least of every figure."""
    common = set.intersection(*(set(device.peak) for device in devices))
    if not common:
        raise ClusterError(f"cluster {name!r}: no dtype family has a peak FLOP/s on the devices of every pool")
    slowest = min(devices, key=lambda device: max(large_product_rate(device, family) for family in common - {"int"}))
    host = [device.host_bandwidth for device in devices], [device.host_memory for device in devices]
    host_bandwidth, host_memory = (None if None in given else min(value for value in given if value is not None) for given in host)
    return replace(
        slowest,
        host_bandwidth=host_bandwidth,
        host_memory=host_memory,
        peak={family: min(device.peak[family] for device in devices) for family in slowest.peak if family in common},
        memory_capacity=slowest.reserved + min(device.usable_memory for device in devices),
        memory_bandwidth=min(device.memory_bandwidth * device.memory_fraction for device in devices) / slowest.memory_fraction,
    )


@functools.lru_cache(maxsize=4096)
def _bind(units: tuple[int, ...], names: tuple[str, ...], stride: int, size: int) -> str:
    """Text of the levels that an axis of `size` with `stride` spans."""
    if size == 1:
        return ALONE
    outer = next(i for i, unit in enumerate(units) if unit % (stride * size) == 0)
    inside = [max(unit // stride, 1) for unit in units[:outer]]  # members of a group in one unit, if whole
    even = all(max(unit, stride) % min(unit, stride) == 0 and size % held == 0 for unit, held in zip(units, inside, strict=False))
    if not even:
        return names[outer]
    branches = [after // before for before, after in itertools.pairwise([1, *inside, size])]
    return _span_text(zip(names, branches, strict=False))


def _span_text(branches: Iterable[tuple[str, int]]) -> str:
    """Text of levels with their branches, inside out."""
    spanned = [(name, count) for name, count in branches if count > 1]
    return spanned[0][0] if len(spanned) == 1 else "+".join(f"{name}:{count}" for name, count in spanned) or ALONE


def bind_axes(cluster: Cluster, sizes: tuple[int, ...]) -> tuple[str, ...] | None:
    """The levels that each axis of a mesh spans (outermost axis first); None if mesh and cluster differ in devices.

    A group on one level is bound to it by name. A group over several levels is bound to "nvlink:8+nic:2": 8 members in
    each unit of the inner level, and 2 such units. A group that fills its units unevenly is bound to the outermost
    level that it crosses, as if no two members were nearer. An axis of size 1 is bound to "device".

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
    """Levels that a group of `group` devices spans, inside out, with their branches, from the text of `bind_axes`."""
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


@functools.lru_cache(maxsize=4096)
def joint_span(cluster: Cluster, spans: tuple[tuple[str, int], ...]) -> str:
    """Text of the levels that several axes span as one group: on each level their branches multiply.

    `spans`: each axis by its text of `bind_axes` and its size.

    >>> from autopar.costmodel import load_cluster
    >>> cluster = load_cluster("dgx-h100").sized(64)
    >>> joint_span(cluster, (("nic", 8), ("nvlink", 8))), joint_span(cluster, (("nvlink", 2), ("nvlink", 4)))
    ('nvlink:8+nic:8', 'nvlink')
    """
    branches = dict.fromkeys((level.name for level in cluster.levels), 1)
    for text, size in spans:
        for level, count in parse_span(cluster, text, size):
            branches[level.name] *= count
    return _span_text(branches.items())
