"""Units: parameters that are gathered, released and reduced together, and how often.

A parameter's redistribution (its gather, and the reduction of its gradient) has one of three modes:

    mode      ZeRO  value                              gradient
    once      1     made once a step, stays whole      added up as used, reduced once a step
    shards    2     made once a step, stays whole      reduced and added up after every micro-batch
    per_pass  3     gathered for each run of segments  reduced and added up after every micro-batch
                    that reads it, then released

Only a redistribution that gathers has mode shards or per_pass. Any other costs nothing, or a cast,
and runs once.

Parameters enter units in the order in which they are first read, until a unit holds `unit_bytes` of
them in their used layouts. Parameters of one mode that take the same steps travel in one message.
`Reductions` may set other units.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from autopar.ir import DTYPE_BYTES, Role, Tensor
from autopar.sharding.gradient_formats import rank_of
from autopar.sharding.layout import local_shape
from autopar.sharding.mesh import Axes
from autopar.sharding.program import Bucket, Program, Redistribute, only_casts, scales_made
from autopar.sharding.redistribution import change, changed_axes, local_bytes
from autopar.sharding.schedule import Reductions, Schedule, Types

from .value_flow import PlacedValue


class Mode(StrEnum):
    """Frequency of a parameter's redistribution in a step."""

    ONCE = "once"
    SHARDS = "shards"
    PER_PASS = "per_pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Redistributions of parameters that are issued together, by their steps of the program.

    `groups`: redistributions that share messages, in the order of gathering; gradients are reduced
    in the reverse order. `buckets`: the sums of gradients in their stored layouts that end here,
    once a step.
    """

    number: int
    mode: Mode
    groups: tuple[tuple[int, ...], ...]
    buckets: tuple[Bucket, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """All redistributions of the unit, group by group."""
        return tuple(itertools.chain.from_iterable(self.groups))


def modes_of(program: Program, schedule: Schedule) -> dict[int, Mode]:
    """The mode of every redistribution of a parameter.

    One that starts from another's result runs at least as often.
    """
    # The modes are listed in ascending order of how often they run.
    order = list(Mode)
    if schedule.gathered == "per_pass":
        gathered = Mode.PER_PASS
    elif schedule.accumulated == "shards":
        gathered = Mode.SHARDS
    else:
        gathered = Mode.ONCE
    modes: dict[int, Mode] = {}
    of_place: dict[PlacedValue, Mode] = {}
    mesh = program.assignment.mesh.shape
    for index, step in enumerate(program.steps):
        if (
            isinstance(step, Redistribute)
            and program.graph.tensors[step.tensor].role is Role.PARAMETER
        ):
            own = gathered if gathers(step, mesh) else Mode.ONCE
            # What starts from a value that is released has to be made whenever that one is.
            mode = max(own, of_place.get((step.tensor, step.chain[0]), Mode.ONCE), key=order.index)
            modes[index] = of_place[step.tensor, step.chain[-1]] = mode
    return modes


def gathers(step: Redistribute, mesh: tuple[int, ...]) -> bool:
    """Whether a redistribution communicates on the way to its value."""
    return any(
        change(before, after, mesh).transfers[0] is not None
        for before, after in itertools.pairwise(step.chain)
    )


def sources_of(program: Program, modes: Mapping[int, Mode]) -> dict[int, int]:
    """The redistribution from whose result another redistribution of a parameter starts."""
    made: dict[PlacedValue, int] = {}
    sources: dict[int, int] = {}
    for index in modes:
        step = program.steps[index]
        assert isinstance(step, Redistribute)
        if (step.tensor, step.chain[0]) in made:
            sources[index] = made[step.tensor, step.chain[0]]
        made[step.tensor, step.chain[-1]] = index
    return sources


def units_of(program: Program, schedule: Schedule, modes: Mapping[int, Mode]) -> tuple[Unit, ...]:
    """The units in the order in which their parameters are first read."""
    sources = sources_of(program, modes)
    units: list[Unit] = []
    summed: set[str] = set()
    for stretch in _stretches(program, schedule, modes, sources):
        # An action is on a whole unit, so all its members run equally often.
        for mode in Mode:
            members = [index for index in stretch if modes[index] is mode]
            if members:
                groups = _groups(program, members, sources, schedule.types)
                units.append(
                    Unit(
                        number=len(units),
                        mode=mode,
                        groups=groups,
                        buckets=_buckets(program, members, summed, schedule),
                    )
                )
    return tuple(units)


def _stretches(
    program: Program, schedule: Schedule, modes: Mapping[int, Mode], sources: Mapping[int, int]
) -> list[list[int]]:
    """The redistributions of each unit: as `reductions` says, else up to `unit_bytes` in a row."""
    told = _told(program, schedule.reductions, modes)
    stretches = _by_bytes(
        program, schedule, [index for index in modes if index not in told], sources
    )
    together: dict[int, list[int]] = {}
    for index, number in told.items():
        together.setdefault(number, []).append(index)
    # In the order of first readers, as units are gathered in the order of their numbers.
    return sorted((*stretches, *together.values()), key=lambda stretch: stretch[0])


def _told(program: Program, reductions: Reductions, modes: Mapping[int, Mode]) -> dict[int, int]:
    """The unit number of each redistribution that `reductions` assigns.

    It is that of a fused set, or of the part between two cuts.
    """
    steps = {
        index: step for index in modes if isinstance(step := program.steps[index], Redistribute)
    }
    sets = {name: number for number, names in enumerate(reductions.fused) for name in names}
    if reductions.cuts:
        # Cuts count gradients as the backward pass completes them: what is read last comes first.
        rest = dict.fromkeys(
            s.tensor for s in reversed(list(steps.values())) if s.gradient and s.tensor not in sets
        )
        rest = {name: None for name in rest if name not in reductions.local}
        sets |= {
            # Numbers behind those of the fused sets, so that the two kinds stay apart.
            name: len(reductions.fused) + bisect.bisect_right(reductions.cuts, place)
            for place, name in enumerate(rest)
        }
    return {index: sets[step.tensor] for index, step in steps.items() if step.tensor in sets}


def _by_bytes(
    program: Program, schedule: Schedule, indices: Sequence[int], sources: Mapping[int, int]
) -> list[list[int]]:
    """Consecutive redistributions, of about `unit_bytes` together."""
    mesh = program.assignment.mesh.shape
    stretches: list[list[int]] = [[]]
    held = 0
    for index in indices:
        step = program.steps[index]
        assert isinstance(step, Redistribute)
        nbytes = program.graph.tensors[step.tensor].bytes
        # A redistribution may gather or cut: the larger of both ends takes the memory.
        size = max(local_bytes(layout, nbytes, mesh) for layout in (step.chain[0], step.chain[-1]))
        if index in sources and _casts(program, sources[index]):
            size = 0  # the redistribution that it starts from counted the parameter already
        # No unit is empty: a parameter that is larger than one still gets its own.
        if stretches[-1] and held + size > schedule.unit_bytes:
            stretches.append([])
            held = 0
        stretches[-1].append(index)
        held += size
    return [stretch for stretch in stretches if stretch]


def _casts(program: Program, index: int) -> bool:
    step = program.steps[index]
    return isinstance(step, Redistribute) and only_casts(step)


def _groups(
    program: Program, members: Sequence[int], sources: Mapping[int, int], types: Types
) -> tuple[tuple[int, ...], ...]:
    """Groups of members of equal depth, types and steps.

    A member that starts from another's result comes behind it.
    """
    mesh = program.assignment.mesh.shape
    groups: dict[tuple[int, object], list[int]] = {}
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
        # Members share a message only if they agree in all of this.
        key = (
            tensor.dtype,
            types.reduced(tensor),
            tensor.narrow.recipe if tensor.narrow else "",
            tuple(scales.axes for scales in scales_made(program.graph, step, mesh)),
            tuple(steps),
            step.gradient,
            step.differentiable,
        )
        groups.setdefault((depth[index], key), []).append(index)
    return tuple(
        tuple(group)
        for _, group in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0]))
    )


def _buckets(
    program: Program, members: Sequence[int], summed: set[str], schedule: Schedule
) -> tuple[Bucket, ...]:
    """Buckets of gradients that are partial in storage, by axes and type.

    They hold the parameters that are first read here.

    Within a bucket, parameters that were read last come first.
    """
    mesh = program.assignment.mesh.shape
    local = schedule.reductions.local
    shards: dict[tuple[tuple[Axes, ...], str, bool], list[tuple[Tensor, int]]] = {}
    # Backward passes complete the gradients of what was read last first.
    for index in reversed(members):
        step = program.steps[index]
        assert isinstance(step, Redistribute)
        # A parameter may be redistributed for several readers, but its gradient is summed once.
        if step.bucketed and step.tensor not in summed and step.tensor not in local:
            summed.add(step.tensor)
            tensor = program.graph.tensors[step.tensor]
            sums = tuple(
                changed_axes(before, after)
                for before, after in itertools.pairwise(step.chain[: step.bucketed + 1])
            )
            shape = local_shape(program.assignment.storage[step.tensor], tensor.shape, mesh)
            several = math.prod(mesh[axis] for axes in sums for axis in axes) > 1
            # Among a single device nothing is sent, so there is nothing to compress.
            rank = rank_of(schedule.reductions.format_of(step.tensor), shape) if several else 0
            shards.setdefault((sums, schedule.reduced(tensor), rank > 0), []).append(
                (replace(tensor, shape=shape), rank)
            )
    made = (
        _of_group(group, sums, DTYPE_BYTES[dtype], factored)
        for (sums, dtype, factored), group in shards.items()
    )
    return tuple(itertools.chain.from_iterable(made))


def _of_group(
    group: Sequence[tuple[Tensor, int]], sums: tuple[Axes, ...], itemsize: int, factored: bool
) -> tuple[Bucket, ...]:
    """The bucket of these shards, or two buckets of their low-rank factors.

    The left factors have a matrix's rows, the right ones its columns.
    """
    names = tuple(shard.name for shard, _ in group)
    ranks = tuple(rank for _, rank in group)
    if not factored:
        return (
            Bucket(
                parameters=names, sums=sums, nbytes=itemsize * sum(shard.size for shard, _ in group)
            ),
        )
    left = itemsize * sum(shard.shape[0] * rank for shard, rank in group)
    right = itemsize * sum(math.prod(shard.shape[1:]) * rank for shard, rank in group)
    return tuple(
        Bucket(parameters=names, sums=sums, nbytes=n, factor=f, ranks=ranks)
        for f, n in ((1, left), (2, right))
    )
