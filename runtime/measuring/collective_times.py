"""Times of collectives on the ranks at hand, from the last rank's entry to the last rank's exit.

All groups of a place communicate at once, as they do in a program that all ranks run; the slowest
group counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.runtime.ranks.collectives import begin_gather

from .crew import Crew

_C10D = torch.ops._c10d_functional
INSIDE: Mapping[str, str] = {"gloo": "loopback", "nccl": "node"}
"""The name of the level inside a node, by backend."""
ACROSS = "nic"
CALLS = 10
"""Calls of which the median is one repeat; fewer where `BUDGET` seconds are spent sooner."""
BUDGET = 0.25
SLOW = 1.0
"""Seconds of a call beyond which no larger size is measured."""
PASSES = 7
"""The most repeats of a size, and `FIRST` the least."""
FIRST = 3

Key = tuple[str, str, int, int]
"""Collective, level, group size, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Groups of `size` ranks that communicate over `level`, all at once.

    drivers: how many of the groups use each node's port.
    """

    level: str
    size: int
    groups: tuple[tuple[int, ...], ...]
    drivers: int = 1


def places(nodes: int, per_node: int, backend: str) -> tuple[GroupPlace, ...]:
    """The groups worth measuring: inside a node, across nodes, and all ranks if that is neither.

    >>> for place in places(2, 2, "gloo"):
    ...     print(place.level, place.size, place.groups)
    loopback 2 ((0, 1), (2, 3))
    nic 2 ((0, 2), (1, 3))
    loopback:2+nic:2 4 ((0, 1, 2, 3),)
    """
    result = []
    inside = INSIDE[backend]
    world = nodes * per_node
    for size in _sizes(per_node):
        groups = (
            tuple(range(start, start + size))
            for node in range(nodes)
            for start in _blocks(node * per_node, per_node, size)
        )
        result.append(GroupPlace(level=inside, size=size, groups=tuple(groups)))
    for size in _sizes(nodes):
        starts = _blocks(0, nodes, size)
        # Ranks of the same number in neighbouring nodes: each node's ranks share its port.
        columns = (
            tuple((start + i) * per_node + local for i in range(size))
            for local in range(per_node)
            for start in starts
        )
        result.append(GroupPlace(level=ACROSS, size=size, groups=tuple(columns), drivers=per_node))
    if nodes > 1 and per_node > 1:
        both = f"{inside}:{per_node}+{ACROSS}:{nodes}"
        result.append(GroupPlace(level=both, size=world, groups=(tuple(range(world)),)))
    return tuple(result)


def _sizes(ranks: int) -> list[int]:
    """The sizes of groups of up to `ranks` ranks: 2, 4, 8, ... and all."""
    if ranks < 2:
        return []
    powers = {2**power for power in range(1, ranks.bit_length())}
    return sorted(powers | {ranks})


def _blocks(start: int, count: int, size: int) -> list[int]:
    """The starts of consecutive blocks of `size` among `count` numbers from `start`."""
    return list(range(start, start + count - size + 1, size))


def measure_collectives(
    crew: Crew,
    where: Sequence[GroupPlace],
    sizes: Sequence[int],
    settled: Callable[[Sequence[float]], bool],
    kinds: Sequence[str],
) -> dict[Key, tuple[float, ...]]:
    """Seconds of each collective by place and size, repeated until `settled` or `PASSES` times."""
    times: dict[Key, list[float]] = {}
    for place in where:
        station = _station(crew, place)
        for kind in kinds:
            # A message has two ends; in a larger group the others would be idle.
            if kind != "send" or place.size == 2:
                times |= _measure(station, kind, sizes, settled)
    return {key: tuple(repeats) for key, repeats in times.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Station:
    """This rank at a place: its group there, and the members; no group where it is left out."""

    crew: Crew
    place: GroupPlace
    group: dist.ProcessGroup | None
    members: tuple[int, ...]


def _measure(
    station: _Station, kind: str, sizes: Sequence[int], settled: Callable[[Sequence[float]], bool]
) -> dict[Key, list[float]]:
    """The repeats of one collective at one place, by size.

    Repeats of a size are apart in time, and unsettled sizes are measured again.
    """
    times: dict[Key, list[float]] = {}
    place = station.place
    whole = [0]
    if kind != "barrier":
        whole = sorted({_whole(size, place.size) for size in sizes})
    for repeat in range(PASSES):
        for nbytes in whole:
            repeats = times.setdefault((kind, place.level, place.size, nbytes), [])
            # Every rank has the times of all, so all of them leave out the same calls.
            if repeat >= FIRST and settled(repeats):
                continue
            seconds = _one_repeat(station.crew, place, _call(station, kind, nbytes))
            repeats.append(seconds)
            # Larger sizes would take minutes, and say nothing that this one does not.
            if seconds > SLOW:
                whole = [size for size in whole if size <= nbytes]
                break
    return times


def _one_repeat(crew: Crew, place: GroupPlace, call: Callable[[], None]) -> float:
    """The median of some calls, after an uncounted one that tells how long a call takes."""
    # The first call of a size makes connections and buffers, so it is not counted.
    first = _slowest_group(crew.timed(call, 1), place)
    # All ranks get the same number, since each has the times of all.
    calls = max(1, min(CALLS, round(BUDGET / float(first))))
    return float(_slowest_group(crew.timed(call, calls), place).median())


def _slowest_group(times: torch.Tensor, place: GroupPlace) -> torch.Tensor:
    """Seconds of each call on the slowest group: [ranks, calls, 3] becomes [calls]."""
    spans = [
        # From the last entry: ranks that came earlier have only waited.
        times[list(ranks), :, 2].amax(0) - times[list(ranks), :, 1].amax(0)
        for ranks in place.groups
    ]
    return torch.stack(spans).amax(0)


def _station(crew: Crew, place: GroupPlace) -> _Station:
    """This rank at a place; all ranks make all groups, since that is a collective of the world."""
    own: dist.ProcessGroup | None = None
    members: tuple[int, ...] = ()
    for ranks in place.groups:
        # The world's own group, since a second one of all ranks would have connections of its own.
        whole = len(ranks) == crew.world
        group = dist.group.WORLD if whole else dist.new_group(list(ranks))
        if crew.rank in ranks:
            own = group
            members = ranks
    return _Station(crew=crew, place=place, group=own, members=members)


def _whole(nbytes: int, group: int) -> int:
    """The bytes nearest below that are as many float32 numbers on every member."""
    return max(nbytes // (4 * group), 1) * 4 * group


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The operands of a collective: the whole, this rank's shard of it, and the group."""

    whole: torch.Tensor
    shard: torch.Tensor
    group: dist.ProcessGroup
    members: tuple[int, ...]
    rank: int

    @property
    def root(self) -> int:
        """The member that sends or receives the whole."""
        return self.members[0]

    @property
    def pieces(self) -> list[torch.Tensor] | None:
        """The whole as shards, on the root alone."""
        if self.rank != self.root:
            return None
        return list(self.whole.split(self.shard.numel()))  # type: ignore[no-untyped-call]


def _call(station: _Station, kind: str, nbytes: int) -> Callable[[], None]:
    """A collective of `nbytes` by the cost model's convention; nothing on a rank left out.

    It is issued as the runtime issues it, where the runtime does.
    """
    if station.group is None:
        return lambda: None
    size = len(station.members)
    device = station.crew.device
    operands = Operands(
        whole=torch.ones(nbytes // 4, device=device),
        shard=torch.ones(nbytes // 4 // size, device=device),
        group=station.group,
        members=station.members,
        rank=station.crew.rank,
    )
    return functools.partial(COLLECTIVES[kind], operands)


def _all_reduce(x: Operands) -> None:
    _C10D.wait_tensor(_C10D.all_reduce(x.whole, "sum", x.group.group_name))


def _all_gather(x: Operands) -> None:
    _C10D.wait_tensor(begin_gather(x.shard, len(x.members), x.group.group_name))


def _reduce_scatter(x: Operands) -> None:
    _C10D.wait_tensor(
        _C10D.reduce_scatter_tensor(x.whole, "sum", len(x.members), x.group.group_name)
    )


def _all_to_all(x: Operands) -> None:
    sizes = [x.shard.numel()] * len(x.members)
    _C10D.wait_tensor(_C10D.all_to_all_single(x.whole, sizes, sizes, x.group.group_name))


def _broadcast(x: Operands) -> None:
    dist.broadcast(x.whole, x.root, group=x.group)


def _reduce(x: Operands) -> None:
    dist.reduce(x.whole, x.root, group=x.group)


def _gather(x: Operands) -> None:
    dist.gather(x.shard, x.pieces, x.root, group=x.group)


def _scatter(x: Operands) -> None:
    dist.scatter(x.shard, x.pieces, x.root, group=x.group)


def _send(x: Operands) -> None:
    if x.rank == x.root:
        dist.send(x.whole, x.members[-1], group=x.group)
    else:
        dist.recv(x.whole, x.root, group=x.group)


def _barrier(x: Operands) -> None:
    dist.barrier(group=x.group)


COLLECTIVES: Mapping[str, Callable[[Operands], None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "barrier": _barrier,
}
KINDS = tuple(COLLECTIVES)


def byte_sizes(smallest: int, largest: int) -> tuple[int, ...]:
    """Powers of four from `smallest` to `largest`, and `largest` itself.

    >>> byte_sizes(1024, 65536)
    (1024, 4096, 16384, 65536)
    """
    count = int(math.log(largest / smallest, 4) + 1e-9) + 1
    return tuple(sorted({*(smallest * 4**i for i in range(count)), largest}))
