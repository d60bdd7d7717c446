"""Units: parameters that are gathered, released and reduced together, flat, and how often that is done.

A parameter's redistribution (its gather, and the reduction of its gradient) has one of three modes:

    mode      value                                gradient
    once      made once a step, kept               added up in its used layout, reduced once a step
    shards    made once a step, kept               reduced and added up after every micro-batch            (ZeRO 2)
    again     gathered for each run of segments    reduced and added up after every micro-batch            (ZeRO 3)
              that reads it, then released

Only a redistribution that gathers has mode shards or again. Any other costs nothing, or a cast, and runs once.

Parameters enter units in the order in which they are first read, until a unit holds `unit_bytes` of them in their used
layouts. Parameters of one mode that take the same steps travel in one message. `Reductions` may set other units.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ..ir import DTYPE_BYTES, Role, Tensor
from ..sharding.gradient_formats import rank_of
from ..sharding.layout import local_shape
from ..sharding.mesh import Axes
from ..sharding.program import Bucket, Collective, Program, Redistribute, chain_collectives
from ..sharding.redistribution import change, changed_axes, local_bytes
from ..sharding.schedule import PLAIN, Reductions, Schedule, Types
from .value_flow import PlacedValue, only_casts


class Mode(StrEnum):
    """Frequency of a parameter's redistribution in a step."""

    ONCE = "once"
    SHARDS = "shards"
    AGAIN = "again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Redistributions of parameters that are issued together, by their steps of the program.

    `groups`: redistributions that share messages, in the order of gathering; gradients are reduced in the reverse
    order. `buckets`: the sums of gradients in their stored layouts that end here, once a step.
    """

    number: int
    mode: Mode
    groups: tuple[tuple[int, ...], ...]
    buckets: tuple[Bucket, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """All redistributions."""
        return tuple(itertools.chain.from_iterable(self.groups))


def modes_of(program: Program, schedule: Schedule) -> dict[int, Mode]:
    """The mode of every redistribution of a parameter; one that starts from another's result runs at least as often."""
    order = list(Mode)
    gathered = Mode.AGAIN if schedule.gathered == "again" else Mode.SHARDS if schedule.accumulated == "shards" else Mode.ONCE
    found: dict[int, Mode] = {}
    of_place: dict[PlacedValue, Mode] = {}
    mesh = program.assignment.mesh.shape
    for index, step in enumerate(program.steps):
        if isinstance(step, Redistribute) and program.graph.tensors[step.tensor].role is Role.PARAMETER:
            own = gathered if gathers(step, mesh) else Mode.ONCE
            mode = max(own, of_place.get((step.tensor, step.chain[0]), Mode.ONCE), key=order.index)
            found[index] = of_place[step.tensor, step.chain[-1]] = mode
    return found


def gathers(step: Redistribute, mesh: tuple[int, ...]) -> bool:
    """Whether a redistribution communicates on the way to its value."""
    return any(change(before, after, mesh).transfers[0] is not None for before, after in itertools.pairwise(step.chain))


def sources_of(program: Program, modes: Mapping[int, Mode]) -> dict[int, int]:
    """The source of each redistribution of a parameter that starts from another redistribution's result."""
    made: dict[PlacedValue, int] = {}
    found: dict[int, int] = {}
    for index in modes:
        step = program.steps[index]
        assert isinstance(step, Redistribute)
        if (step.tensor, step.chain[0]) in made:
            found[index] = made[step.tensor, step.chain[0]]
        made[step.tensor, step.chain[-1]] = index
    return found


def units_of(program: Program, schedule: Schedule, modes: Mapping[int, Mode]) -> tuple[Unit, ...]:
    """The units in the order in which their parameters are first read."""
    sources = sources_of(program, modes)
    found: list[Unit] = []
    summed: set[str] = set()
    for stretch in _stretches(program, schedule, modes, sources):
        for mode in Mode:
            members = [index for index in stretch if modes[index] is mode]
            if members:
                groups = _groups(program, members, sources, schedule.types)
                found.append(Unit(number=len(found), mode=mode, groups=groups, buckets=_buckets(program, members, summed, schedule)))
    return tuple(found)


def _stretches(program: Program, schedule: Schedule, modes: Mapping[int, Mode], sources: Mapping[int, int]) -> list[list[int]]:
    """The redistributions of each unit: as `reductions` says, or consecutive parameters up to `unit_bytes`."""
    told = _told(program, schedule.reductions, modes)
    found = _by_bytes(program, schedule, [index for index in modes if index not in told], sources)
    together: dict[int, list[int]] = {}
    for index, number in told.items():
        together.setdefault(number, []).append(index)
    return sorted((*found, *together.values()), key=lambda stretch: stretch[0])


def _told(program: Program, reductions: Reductions, modes: Mapping[int, Mode]) -> dict[int, int]:
    """The unit number of each redistribution that `reductions` assigns: its fused set, or its part between two cuts."""
    steps = {index: step for index in modes if isinstance(step := program.steps[index], Redistribute)}
    sets = {name: number for number, names in enumerate(reductions.fused) for name in names}
    if reductions.cuts:
        rest = dict.fromkeys(s.tensor for s in reversed(list(steps.values())) if s.gradient and s.tensor not in sets)
        rest = {name: None for name in rest if name not in reductions.local}
        sets |= {name: len(reductions.fused) + bisect.bisect_right(reductions.cuts, place) for place, name in enumerate(rest)}
    return {index: sets[step.tensor] for index, step in steps.items() if step.tensor in sets}


def _by_bytes(program: Program, schedule: Schedule, indices: Sequence[int], sources: Mapping[int, int]) -> list[list[int]]:
    """Consecutive redistributions, of about `unit_bytes` together."""
    mesh = program.assignment.mesh.shape
    stretches: list[list[int]] = [[]]
    held = 0
    for index in indices:
        step = program.steps[index]
        assert isinstance(step, Redistribute)
        nbytes = program.graph.tensors[step.tensor].bytes
        size = max(local_bytes(layout, nbytes, mesh) for layout in (step.chain[0], step.chain[-1]))
        if index in sources and _casts(program, sources[index]):
            size = 0  # counted already
        if stretches[-1] and held + size > schedule.unit_bytes:
            stretches.append([])
            held = 0
        stretches[-1].append(index)
        held += size
    return [stretch for stretch in stretches if stretch]


def _casts(program: Program, index: int) -> bool:
    step = program.steps[index]
    return isinstance(step, Redistribute) and only_casts(step)


def _groups(program: Program, members: Sequence[int], sources: Mapping[int, int], types: Types) -> tuple[tuple[int, ...], ...]:
    """Groups of members of equal depth, types and steps; a member that starts from another's result comes behind it."""
    mesh = program.assignment.mesh.shape
    found: dict[tuple[int, object], list[int]] = {}
    depth: dict[int, int] = {}
    for index in members:
        step = program.steps[index]
        assert isinstance(step, Redistribute)
        depth[index] = depth.get(sources.get(index, -1), -1) + 1
        steps = []
        for before, after in itertools.pairwise(step.chain[step.bucketed :]):
            moved = change(before, after, mesh)
            steps.append((moved.axes, moved.before.kind, moved.after.kind, moved.before.reduction))
        tensor = program.graph.tensors[step.tensor]
        key = (tensor.dtype, types.reduced(tensor), tuple(steps), step.gradient, step.differentiable)
        found.setdefault((depth[index], key), []).append(index)
    return tuple(tuple(group) for _, group in sorted(found.items(), key=lambda item: (item[0][0], item[1][0])))


def _buckets(program: Program, members: Sequence[int], summed: set[str], schedule: Schedule) -> tuple[Bucket, ...]:
    """Buckets of gradients that are partial in storage, by axes and type, of parameters first read here.

    Within a bucket, parameters that were read last come first.
    """
    mesh, local = program.assignment.mesh.shape, schedule.reductions.local
    found: dict[tuple[tuple[Axes, ...], str, bool], list[tuple[Tensor, int]]] = {}
    for index in reversed(members):
        step = program.steps[index]
        assert isinstance(step, Redistribute)
        if step.bucketed and step.tensor not in summed and step.tensor not in local:
            summed.add(step.tensor)
            tensor = program.graph.tensors[step.tensor]
            sums = tuple(changed_axes(before, after) for before, after in itertools.pairwise(step.chain[: step.bucketed + 1]))
            shape = local_shape(program.assignment.storage[step.tensor], tensor.shape, mesh)
            several = math.prod(mesh[axis] for axes in sums for axis in axes) > 1
            rank = rank_of(schedule.reductions.format_of(step.tensor), shape) if several else 0
            found.setdefault((sums, schedule.reduced(tensor), rank > 0), []).append((replace(tensor, shape=shape), rank))
    made = (_of_group(group, sums, DTYPE_BYTES[dtype], factored) for (sums, dtype, factored), group in found.items())
    return tuple(itertools.chain.from_iterable(made))


def _of_group(group: Sequence[tuple[Tensor, int]], sums: tuple[Axes, ...], itemsize: int, factored: bool) -> tuple[Bucket, ...]:
    """The bucket of these shards, or two buckets of their low-rank factors.

    The left factors have a matrix's rows, the right ones its columns.
    """
    names, ranks = tuple(shard.name for shard, _ in group), tuple(rank for _, rank in group)
    if not factored:
        return (Bucket(parameters=names, sums=sums, nbytes=itemsize * sum(shard.size for shard, _ in group)),)
    left = itemsize * sum(shard.shape[0] * rank for shard, rank in group)
    right = itemsize * sum(math.prod(shard.shape[1:]) * rank for shard, rank in group)
    return tuple(Bucket(parameters=names, sums=sums, nbytes=n, factor=f, ranks=ranks) for f, n in ((1, left), (2, right)))


def gather_collectives(program: Program, unit: Unit, phase: str = "forward") -> Iterator[Collective]:
    """Collectives of a unit's gather: one a step for each group."""
    for group in unit.groups:
        yield from _flat([ahead for ahead, _ in _chains(program, group, PLAIN.types)], phase)


def reduce_collectives(program: Program, unit: Unit, types: Types, *, last: bool) -> Iterator[Collective]:
    """Collectives that reduce a unit's gradients, for the `last` micro-batch of a step or an earlier one."""
    if last or unit.mode is not Mode.ONCE:
        for group in reversed(unit.groups):
            yield from _flat([back[::-1] for _, back in _chains(program, group, types)], "backward")
    if last:
        for bucket in unit.buckets:
            for axes in bucket.sums:
                yield Collective(phase="backward", kind="all_reduce", axes=axes, nbytes=bucket.nbytes, tensor=bucket.parameters[0])


def _chains(program: Program, group: Sequence[int], types: Types) -> Iterator[tuple[list[Collective], list[Collective]]]:
    """The collectives of the members one by one."""
    mesh = program.assignment.mesh.shape
    steps = (program.steps[index] for index in group)
    return (chain_collectives(program.graph, step, mesh, types) for step in steps if isinstance(step, Redistribute))


def _flat(each: Sequence[Sequence[Collective]], phase: str) -> Iterator[Collective]:
    """The collectives of the members joined, one for each step that has any."""
    for joined in zip(*each, strict=True):
        first = joined[0]
        yield Collective(phase=phase, kind=first.kind, axes=first.axes, nbytes=sum(c.nbytes for c in joined), tensor=first.tensor)
