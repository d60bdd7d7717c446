"""`Cluster`: devices joined by levels of links from the inside out, of one kind or in pools.

Times are in seconds, sizes in bytes. Devices are numbered so that neighbours share the innermost
levels: with 8 devices a node, devices 0 to 7 are node 0. A mesh numbers its ranks in row-major
order, so its last axis varies over neighbouring devices.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.costmodel.device import Device
from autopar.costmodel.device.kernel_seconds import large_product_rate
from autopar.costmodel.frameworks import AUTOPAR, OWN, Framework
from autopar.errors import ClusterError, unknown

from .level import Level
from .measured_collectives import Measured
from .source import Source

BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices of one kind and the `levels` that join them, inside out; or several such pools.

    `backend`: the library of its collectives ("nccl" or "gloo"). `shared_host`: the devices are
    ranks of one host, which divide its compute, memory and links; the figures are those of one rank
    at the present number. `cores`: of the host for each rank; below 1, a waiting rank leaves its
    share to the others (None: each rank has its own). `sources`: the source of each figure, by
    "device.launch", "device.peak.float32", "nic.bandwidth". `measured`: calibrated collectives,
    which overrule the table of algorithms. `framework`: that runs what is priced on
    it. `joined`: the pools of a cluster of several kinds of
    devices (`join`); `device` and `levels` are then those of a mesh over all pools.
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
    framework: Framework = field(default=AUTOPAR, hash=False)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ClusterError(
                f"cluster {self.name!r}: " + unknown("backend", self.backend, BACKENDS)
            )
        names = [level.name for level in self.levels]
        if not names or len(set(names)) != len(names):
            raise ClusterError(
                f"cluster {self.name!r}: it needs at least one level, of distinct names, not "
                f"[{', '.join(names)}]"
            )
        for entry in self.measured:
            for part in entry.level.split("+"):
                self.level(part.partition(":")[0])

    def __hash__(self) -> int:
        # Of few fields: caches ask for it very often.
        return hash((self.name, self.device.name, tuple([level.size for level in self.levels])))

    @property
    def fuses(self) -> bool:
        """Whether a compiler makes a kernel of each tree of pointwise operators."""
        return self.framework.fuses and self.backend != "gloo"

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod([level.size for level in self.levels])

    @property
    def units(self) -> tuple[int, ...]:
        """Number of devices that one unit of each level holds: (8, 32) for 4 nodes of 8."""
        return tuple(
            itertools.accumulate((level.size for level in self.levels), lambda a, b: a * b)
        )

    @property
    def pools(self) -> tuple[Cluster, ...]:
        """The cluster's pools in their order, each of one kind of device.

        A cluster of one kind is its own pool.
        """
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
        """The share of a core that a rank has while all ranks of its host are at work.

        It is 1 where each rank has a core of its own.
        """
        return 1.0 if self.cores is None else min(self.cores, 1.0)

    def run_by(self, framework: Framework) -> Cluster:
        """The cluster where this framework runs what is priced."""
        pools = tuple(pool.run_by(framework) for pool in self.joined)
        return replace(self, framework=framework, joined=pools)

    def host_seconds(self, action: str) -> float:
        """Seconds of the host for one of `HOST_ACTIONS`; 0 where the framework takes none."""
        return self.device.host_seconds(action) if self.framework.takes(action) else 0.0

    @property
    def seconds_of_call(self) -> float:
        """Seconds for which the host of the framework issues a call of an operator.

        What is compiled is issued ahead; the own runtime's host is known by its actions.
        """
        framework = self.framework
        issued = framework.name != OWN and not framework.habits.compiled
        return self.device.dispatch if issued else 0.0

    def level(self, name: str) -> Level:
        """The level called `name`."""
        for level in self.levels:
            if level.name == name:
                return level
        raise ClusterError(unknown("level", name, [level.name for level in self.levels]))

    def sized(self, devices: int) -> Cluster:
        """Return the cluster cut or grown to `devices`, any positive number.

        From the inside out each level takes the largest divisor of the remaining number that it has
        room for, and the outermost level takes the rest, so all units stay equal. With nodes of 8,
        3072 devices are 384 nodes; 12 are 2 nodes with 6 devices in use each; 7 are one node with 7
        in use; 11 have no such divisor but 1, so they are one device in each of 11 nodes. A cut
        cluster has no more nodes than before: if equal units would need more, its first devices are
        taken (`part`), so 11 of 16 are a node of 8 and 3 more. Pools are cut from the last one on.
        They do not grow, since nothing says which of them should.
        """
        if devices < 1:
            raise ClusterError(
                f"cluster {self.name!r}: the number of devices is {devices}; it must be at least 1"
            )
        if devices == self.devices:
            return self
        if self.joined:
            return _cut(self, devices)
        return _sized(self, devices)

    def part(self, start: int, count: int) -> Cluster:
        """Return the `count` devices from number `start` on, as the devices of a pipeline stage.

        The rest of the cluster is in use as well. `sized` describes a cluster of another size; a
        part keeps each device's share of its host and of a shared port. A unit of u devices is
        filled in blocks of g = gcd(start, count, u), none of which crosses a unit. Blocks count as
        members of one unit, and devices of different blocks as if they only shared the unit
        outside. With nodes of 8, devices 0 to 11 are 3 blocks of 4 over the network. Devices of
        several pools are a part of the mesh over all.
        """
        if start < 0 or count < 1 or start + count > self.devices:
            raise ClusterError(
                f"cluster {self.name!r}: of {self.devices} devices there are no {count} from "
                f"number {start} on"
            )
        if count == self.devices:
            return self
        for first, pool in zip(self.starts, self.joined, strict=False):
            if first <= start and start + count <= first + pool.devices:
                return pool.part(start - first, count)
        sizes = []
        before = 1
        for unit in self.units:
            inside = start // unit == (start + count - 1) // unit
            block = count if inside else math.gcd(start, count, unit)
            sizes.append(block // before)
            before = block
        return _part(self, tuple(sizes))


@functools.lru_cache(maxsize=4096)
def _sized(cluster: Cluster, devices: int) -> Cluster:
    """The cluster, of one kind of device, with another number of devices."""
    left = devices
    levels = []
    for level in cluster.levels[:-1]:
        room = max(level.size, level.slots)
        size = max(size for size in range(1, min(room, left) + 1) if left % size == 0)
        # The free places are remembered, so that a cluster that was cut can grow back.
        levels.append(replace(level, size=size, slots=room if size < room else 0))
        left //= size
    if devices < cluster.devices and left > cluster.levels[-1].size:
        return cluster.part(0, devices)
    levels.append(replace(cluster.levels[-1], size=left))
    if not cluster.shared_host:
        return replace(cluster, levels=tuple(levels))
    # The ranks of one host divide its memory, links and cores: fewer ranks have more each.
    factor = cluster.devices / devices
    shared = tuple(replace(level, bandwidth=level.bandwidth * factor) for level in levels)
    measured = tuple(entry.shared(factor) for entry in cluster.measured)
    cores = None if cluster.cores is None else cluster.cores * factor
    return replace(
        cluster, levels=shared, device=cluster.device.shared(factor), measured=measured, cores=cores
    )


@functools.lru_cache(maxsize=4096)
def _part(cluster: Cluster, sizes: tuple[int, ...]) -> Cluster:
    """Return the cluster with levels of these sizes.

    A port gives each device as much as in the whole cluster.
    """
    count = math.prod(sizes)
    levels = []
    held = 1
    for level, size, unit in zip(cluster.levels, sizes, (1, *cluster.units), strict=False):
        shares = min(level.shared_by, held) / min(level.shared_by, unit, count)
        levels.append(replace(level, size=size, bandwidth=level.bandwidth * shares, slots=0))
        held *= size
    return replace(cluster, levels=tuple(levels), joined=())


def _cut(cluster: Cluster, devices: int) -> Cluster:
    """The first pools of a cluster that hold `devices`, with the last of them cut."""
    if devices > cluster.devices:
        raise ClusterError(
            f"cluster {cluster.name!r} has {cluster.inventory}, not {devices} devices; its file "
            "can add some"
        )
    pools = [
        pool for first, pool in zip(cluster.starts, cluster.pools, strict=True) if first < devices
    ]
    pools[-1] = pools[-1].sized(devices - cluster.starts[len(pools) - 1])
    if len(pools) == 1:
        return replace(pools[0], name=cluster.name)
    return join(cluster.name, pools, between=cluster.levels[-1], sources=cluster.sources)


def join(
    name: str,
    pools: Sequence[Cluster],
    *,
    between: Level,
    sources: Mapping[str, Source] | None = None,
) -> Cluster:
    """Return a cluster of two or more pools whose nodes are joined by `between`.

    The size of `between` is that of the cluster. A mesh over devices of several pools runs at the
    pace of the slowest pool. Its `device` is the one with the slowest matrix products, with the
    least memory and memory bandwidth of all; inside its nodes it has the slowest links.
    """
    names = {level.name for pool in pools for level in pool.levels}
    if len(pools) < 2 or any(pool.joined for pool in pools):
        raise ClusterError(
            f"cluster {name!r}: it needs two or more pools, each of one kind of device"
        )
    if len({pool.backend for pool in pools}) > 1:
        raise ClusterError(
            f"cluster {name!r}: its pools have different backends "
            f"({', '.join(pool.backend for pool in pools)})"
        )
    if between.name in names:
        raise ClusterError(
            f"cluster {name!r}: the level between its pools needs a name of its own, not "
            f"{between.name!r}"
        )
    # A mesh over several pools waits for the slowest of their links.
    inner = replace(
        min((pool.levels[0] for pool in pools), key=lambda level: level.rate(2)), slots=0
    )
    # Its nodes divide every pool and every pool's nodes, so that no node mixes two pools.
    held = math.gcd(*(pool.units[0] for pool in pools), *(pool.devices for pool in pools))
    nodes = sum(pool.devices for pool in pools) // held
    return Cluster(
        name=name,
        device=_slowest(name, [pool.device for pool in pools]),
        backend=pools[0].backend,
        sources=sources or {},
        framework=pools[0].framework,
        levels=(replace(inner, size=held), replace(between, size=nodes)),
        joined=tuple(pools),
    )


def _slowest(name: str, devices: Sequence[Device]) -> Device:
    """A device with the least of every figure."""
    common = set.intersection(*(set(device.peak) for device in devices))
    if not common:
        raise ClusterError(
            f"cluster {name!r}: no dtype family has a peak FLOP/s on the devices of every pool"
        )
    slowest = min(
        devices,
        key=lambda device: max(large_product_rate(device, family) for family in common - {"int"}),
    )
    host = [device.host_bandwidth for device in devices], [device.host_memory for device in devices]
    # A figure that is unknown for one pool is unknown for a mesh over all.
    host_bandwidth, host_memory = (
        None if None in given else min(value for value in given if value is not None)
        for given in host
    )
    return replace(
        slowest,
        host_bandwidth=host_bandwidth,
        host_memory=host_memory,
        peak={
            family: min(device.peak[family] for device in devices)
            for family in slowest.peak
            if family in common
        },
        # Prices use the usable memory and the streaming rate, so these are the least of all pools.
        memory_capacity=slowest.reserved + min(device.usable_memory for device in devices),
        memory_bandwidth=min(device.memory_bandwidth * device.memory_fraction for device in devices)
        / slowest.memory_fraction,
    )
