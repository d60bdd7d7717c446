"""Times of collectives on the ranks at hand, call by call: from the last rank's entry to the last rank's exit.

All groups of a place communicate at once, as they do in a program that all ranks run; the slowest group counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

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
    """Groups of `size` ranks that communicate over `level`, all at once; `drivers` of them use each node's port."""

    level: str
    size: int
    groups: tuple[tuple[int, ...], ...]
    drivers: int = 1


def places(nodes: int, per_node: int, backend: str) -> tuple[GroupPlace, ...]:
    """The groups worth measuring: inside a node, across nodes, and all ranks if that is neither.

    >>> [(p.level, p.size, p.groups) for p in places(2, 2, "gloo")]
    [('loopback', 2, ((0, 1), (2, 3))), ('nic', 2, ((0, 2), (1, 3))), ('loopback:2+nic:2', 4, ((0, 1, 2, 3),))]
    """
    found = []
    inside, world = INSIDE[backend], nodes * per_node
    for size in _sizes(per_node):
        groups = (tuple(range(start, start + size)) for node in range(nodes) for start in _blocks(node * per_node, per_node, size))
        found.append(GroupPlace(level=inside, size=size, groups=tuple(groups)))
    for size in _sizes(nodes):
        starts = _blocks(0, nodes, size)
        columns = (tuple((start + i) * per_node + local for i in range(size)) for local in range(per_node) for start in starts)
        found.append(GroupPlace(level=ACROSS, size=size, groups=tuple(columns), drivers=per_node))
    if nodes > 1 and per_node > 1:
        found.append(GroupPlace(level=f"{inside}:{per_node}+{ACROSS}:{nodes}", size=world, groups=(tuple(range(world)),)))
    return tuple(found)


def _sizes(ranks: int) -> list[int]:
    """2, 4, 8, ... and all."""
    return sorted({2**power for power in range(1, ranks.bit_length()) if 2**power <= ranks} | ({ranks} if ranks > 1 else set()))


def _blocks(start: int, count: int, size: int) -> list[int]:
    return list(range(start, start + count - size + 1, size))


def measure_collectives(
    crew: Crew,
    where: Sequence[GroupPlace],
    sizes: Sequence[int],
    settled: Callable[[Sequence[float]], bool],
    kinds: Sequence[str],
) -> dict[Key, tuple[float, ...]]:
    """Seconds of each collective at each place and size, repeated until `settled`, within `PASSES`."""
    found: dict[Key, list[float]] = {}
    for place in where:
        group, members = _group(crew, place)
        for kind in kinds:
            if kind != "send" or place.size == 2:
                _measure(crew, place, group, members, kind, sizes, settled, found)
    return {key: tuple(repeats) for key, repeats in found.items()}


def _measure(
    crew: Crew,
    place: GroupPlace,
    group: dist.ProcessGroup | None,
    members: tuple[int, ...],
    kind: str,
    sizes: Sequence[int],
    settled: Callable[[Sequence[float]], bool],
    found: dict[Key, list[float]],
) -> None:
    """One collective at one place; repeats of a size are apart in time, and unsettled sizes are measured again."""
    whole = sorted({_whole(size, place.size) for size in sizes}) if kind != "barrier" else [0]
    for repeat in range(PASSES):
        for nbytes in whole:
            repeats = found.setdefault((kind, place.level, place.size, nbytes), [])
            if repeat >= FIRST and settled(repeats):
                continue
            call = _call(kind, nbytes, group, members, crew) if group is not None else lambda: None
            seconds = _one_repeat(crew, place, call)
            repeats.append(seconds)
            if seconds > SLOW:
                whole = [size for size in whole if size <= nbytes]
                break


def _one_repeat(crew: Crew, place: GroupPlace, call: Callable[[], None]) -> float:
    """The median of some calls, after an uncounted one that tells how long a call takes."""
    first = _slowest_group(crew.timed(call, 1), place)
    calls = max(1, min(CALLS, round(BUDGET / float(first))))
    return float(_slowest_group(crew.timed(call, calls), place).median())


def _slowest_group(times: torch.Tensor, place: GroupPlace) -> torch.Tensor:
    """Seconds of each call: [ranks, calls, 3] → [calls]."""
    spans = [times[list(ranks), :, 2].amax(0) - times[list(ranks), :, 1].amax(0) for ranks in place.groups]
    return torch.stack(spans).amax(0)


def _group(crew: Crew, place: GroupPlace) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
    """This rank's group at a place and its members; none where the groups leave it out. All ranks make all groups."""
    own: tuple[dist.ProcessGroup | None, tuple[int, ...]] = (None, ())
    for ranks in place.groups:
        whole = len(ranks) == crew.world
        made = dist.group.WORLD if whole else dist.new_group(list(ranks))
        if crew.rank in ranks:
            own = (made, ranks)
    return own


def _whole(nbytes: int, group: int) -> int:
    """The bytes nearest below that are as many float32 numbers on every member."""
    return max(nbytes // (4 * group), 1) * 4 * group


def _call(kind: str, nbytes: int, group: dist.ProcessGroup, members: tuple[int, ...], crew: Crew) -> Callable[[], None]:
    """One collective of `nbytes` by the cost model's convention, issued as the runtime issues it where it does."""
    size, device = len(members), crew.device
    whole = torch.ones(nbytes // 4, device=device)
    shard = torch.ones(nbytes // 4 // size, device=device)
    return _CALLS[kind](whole, shard, group, members, crew.rank)


_Call = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, tuple[int, ...], int], Callable[[], None]]


def _pieces(whole: torch.Tensor, shard: torch.Tensor, own: bool) -> list[torch.Tensor] | None:
    return list(whole.split(shard.numel())) if own else None  # type: ignore[no-untyped-call]


def _wait(out: torch.Tensor) -> None:
    _C10D.wait_tensor(out)


def _send(x: torch.Tensor, _: torch.Tensor, group: dist.ProcessGroup, members: tuple[int, ...], rank: int) -> Callable[[], None]:
    if rank == members[0]:
        return lambda: dist.send(x, members[-1], group=group)
    return lambda: (dist.recv(x, members[0], group=group), None)[1]


_CALLS: Mapping[str, _Call] = {
    "all_reduce": lambda x, y, g, m, r: lambda: _wait(_C10D.all_reduce(x, "sum", g.group_name)),
    "all_gather": lambda x, y, g, m, r: lambda: _wait(_C10D.all_gather_into_tensor(y, len(m), g.group_name)),
    "reduce_scatter": lambda x, y, g, m, r: lambda: _wait(_C10D.reduce_scatter_tensor(x, "sum", len(m), g.group_name)),
    "all_to_all": lambda x, y, g, m, r: lambda: _wait(_C10D.all_to_all_single(x, [y.numel()] * len(m), [y.numel()] * len(m), g.group_name)),
    "broadcast": lambda x, y, g, m, r: lambda: (dist.broadcast(x, m[0], group=g), None)[1],
    "reduce": lambda x, y, g, m, r: lambda: (dist.reduce(x, m[0], group=g), None)[1],
    "gather": lambda x, y, g, m, r: lambda: (dist.gather(y, _pieces(x, y, r == m[0]), m[0], group=g), None)[1],
    "scatter": lambda x, y, g, m, r: lambda: (dist.scatter(y, _pieces(x, y, r == m[0]), m[0], group=g), None)[1],
    "send": _send,
    "barrier": lambda x, y, g, m, r: lambda: (dist.barrier(group=g), None)[1],
}
KINDS = tuple(_CALLS)


def byte_sizes(smallest: int, largest: int) -> tuple[int, ...]:
    """Powers of four from `smallest` to `largest`, and `largest` itself.

    >>> byte_sizes(1024, 65536)
    (1024, 4096, 16384, 65536)
    """
    count = int(math.log(largest / smallest, 4) + 1e-9) + 1
    return tuple(sorted({*(smallest * 4**i for i in range(count)), largest}))
