"""The best pipeline on groups of devices: strategies solved, stages cut, both within the memory.

Each group is solved as if one of its stages held the whole model, with the memory of all its
stages. The cuts then give every stage a stretch of operators, with the strategies of its group. The
tables know the memory of all stages together only. So where no cut fits each device, the groups are
solved again within less memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.planning.model import Request
from autopar.planning.solve.within_limits import solve_within
from autopar.planning.tables import Tables
from autopar.planning.tables.requested import with_host_choices
from autopar.search import Infeasible, Solution
from autopar.sharding.schedule import Schedule

from .parts import Expand, Group, Part, cutter_of, part_of, rooms_of, unfolded
from .stage import Pipeline

__all__ = [
    "Cut",
    "Expand",
    "Group",
    "Part",
    "StagedProgram",
    "best_pipeline",
    "cut_of",
    "interleaved",
    "pipeline_of",
    "recut",
    "unfolded",
]

TRIES = 5
"""How often the groups are solved until a cut fits, and the limit of their tables is near."""
TIGHTER = 0.85
"""The factor on the limit of the tables where a pipeline fits, and is to need less."""
SURE = 1.1
"""How many times the bytes by which the fullest device exceeds its memory are to be saved."""
TIGHTEST = 0.7
"""The least factor on the bytes that the last solution used, in one step."""
ROOMY = 4.0
"""A pipeline that fits so many times into the memory is as fast without a limit."""
INTERLEAVED_ROUNDS = 2
"""How often the groups are solved again so that an interleaved schedule fits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedProgram:
    """A pipeline: its parts in the order of their stages, and the cuts of the model.

    `tightened`: as of `PricedProgram`.
    """

    parts: tuple[Part, ...]
    pipeline: Pipeline
    schedule: Schedule
    tightened: bool = False

    @property
    def stages(self) -> int:
        """Number of stages."""
        return sum(part.group.stages for part in self.parts)

    @property
    def devices(self) -> int:
        """Devices of all stages."""
        return sum(part.group.stages * part.group.mesh.devices for part in self.parts)

    @property
    def parts_of_stages(self) -> list[Part]:
        """The part of every stage, or of every chunk where stages hold several."""
        # Chunks go around the devices in turn.
        once = [part for part in self.parts for _ in range(part.group.stages)]
        return once * self.pipeline.interleave

    def part_of(self) -> dict[str, Part]:
        """Return the part of every operator, by its name."""
        operators = self.parts[0].tables.analysis.graph.operators
        pairs = zip(self.pipeline.stages, self.parts_of_stages, strict=True)
        return {
            op.name: part for stage, part in pairs for op in operators[stage.start : stage.stop]
        }

    @property
    def cost(self) -> float:
        """Seconds of a step as the tables add them up."""
        return sum(
            part.group.share * part.solution.cost / part.group.stages for part in self.parts
        ) / len(self.parts)

    @property
    def memory(self) -> float:
        """Bytes of the fullest device at the peak."""
        return self.pipeline.memory

    @property
    def seconds(self) -> float:
        """Seconds of a step, rounded so that equal programs are equally fast."""
        return round(self.pipeline.step, 12)

    @property
    def rank(self) -> tuple[float, int, int]:
        """Order among candidates: time, then stages, then axes."""
        return (self.seconds, self.stages, len(self.parts[0].assignment.mesh.axes) + 1)


class _TableLimits:
    """The limits within which the groups' tables are solved next.

    `allowed`: bytes of all stages of each group. `above`: the least limits whose solutions no cut
    fitted. `fitting`: limits whose solutions a cut fitted, if any did.
    """

    def __init__(self, groups: Sequence[Group], allowed: list[float]) -> None:
        self.groups = groups
        self.allowed = allowed
        self.above = allowed
        self.fitting: list[float] | None = None

    def loosen(self) -> None:
        """Allow more: the tables have no solution within so little."""
        self.allowed = _between(self.above, self.allowed)

    def tighten(self, parts: Sequence[Part], excess: float) -> None:
        """Allow less: no cut of these parts fits, by `excess` bytes of the fullest device."""
        self.above = _used(parts, self.allowed)
        if self.fitting:
            self.allowed = _between(self.above, self.fitting)
        else:
            self.allowed = _tighter(self.groups, self.above, excess)

    def approach(self) -> None:
        """Allow a little more than what fitted, as the step may be shorter there."""
        self.fitting = self.allowed
        self.allowed = _between(self.above, self.allowed)


def best_pipeline(
    groups: Sequence[Group],
    tables: Callable[[Group], Tables],
    schedule: Schedule,
    request: Request,
    *,
    always: float,
    expand: Expand = unfolded,
    solved: Solution | None = None,
    too_slow: float = math.inf,
) -> StagedProgram:
    """Return the best pipeline on the groups; raises `Infeasible` if no cut fits.

    `always`: bytes of each device that inputs and constants take. `expand`: as of `Expand`.
    `solved`: the solution of the only group within its memory, if it is known. `too_slow`: cuts
    that take so many seconds are left out; raises `Slower` if all do.
    """
    offered = [tables(group) for group in groups]
    rooms = rooms_of(groups, request, always)
    limits = _TableLimits(
        groups,
        [group.stages * room / group.share for group, room in zip(groups, rooms, strict=True)],
    )
    least = math.inf
    best: StagedProgram | None = None
    # The first pipeline that fits ends it; after failures a better one is looked for.
    for number in range(TRIES):
        first = number == 0
        try:
            if first and solved is not None:
                parts: tuple[Part, ...] = (
                    part_of(groups[0], offered[0], solved, schedule, expand),
                )
            else:
                solutions = _solutions(offered, limits.allowed, request)
                parts = _parts(groups, offered, solutions, schedule, expand)
        except Infeasible:
            if first:
                raise
            limits.loosen()
            continue
        cutter, schedules = cutter_of(parts, rooms, schedule, request)
        pipeline = cutter.best(schedules, too_slow if first else math.inf)
        if pipeline is None:
            # How much is lacking says how much to save in the next solution.
            needed = cutter.least_memory(schedules)
            least = min(least, needed + always)
            limits.tighten(parts, max(needed - min(rooms), 0.0))
            continue
        if best is None or pipeline.step < best.pipeline.step:
            best = StagedProgram(
                parts=parts, pipeline=pipeline, schedule=schedule, tightened=not first
            )
        # A first solution that fits is the tables' optimum; nothing is gained by more memory.
        if first or limits.fitting:
            break
        limits.approach()
    if best is not None:
        return best
    memory_limit = min(request.memory_limit_on(group.cluster) for group in groups)
    raise Infeasible(max(least, math.nextafter(memory_limit, math.inf)), memory_limit)


def interleaved(staged: StagedProgram, request: Request, *, always: float) -> StagedProgram:
    """Return a pipeline under a faster interleaved schedule, if thriftier strategies admit one.

    Interleaved schedules keep more micro-batches in flight.
    """
    best = staged
    parts = staged.parts
    groups = [part.group for part in parts]
    offered = [
        with_host_choices(request, part.tables, part.group.stages / part.group.share)
        for part in parts
    ]
    rooms = rooms_of(groups, request, always)
    allowed = [math.inf] * len(parts)
    cutter, schedules = cutter_of(parts, rooms, staged.schedule, request)
    for _ in range(INTERLEAVED_ROUNDS):
        if not cutter.could_be_faster(schedules, best.pipeline):
            break
        # An interleaved schedule keeps more in flight, so its strategies have to keep less.
        allowed = _tighter(groups, _used(parts, allowed), 0.0)
        try:
            solutions = _solutions(offered, allowed, request)
        except Infeasible:
            break
        parts = _parts(groups, offered, solutions, staged.schedule, unfolded)
        cutter, schedules = cutter_of(parts, rooms, staged.schedule, request)
        pipeline = cutter.best(schedules)
        if pipeline is not None and pipeline.step < best.pipeline.step:
            best = StagedProgram(
                parts=parts, pipeline=pipeline, schedule=staged.schedule, tightened=True
            )
    return best


def pipeline_of(
    group: Group,
    tables: Tables,
    solution: Solution,
    schedule: Schedule,
    request: Request,
    *,
    always: float,
) -> StagedProgram | None:
    """Return the pipeline of a known solution on one group, or None if no cut fits."""
    parts = (part_of(group, tables, solution, schedule),)
    rooms = rooms_of([group], request, always)
    cutter, schedules = cutter_of(parts, rooms, schedule, request)
    pipeline = cutter.best(schedules)
    if pipeline is None:
        return None
    return StagedProgram(parts=parts, pipeline=pipeline, schedule=schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A solution at its best cuts (None: none fits).

    `memory`: bytes of the fullest device. `free`: seconds of the step without a limit of memory.
    """

    pipeline: Pipeline | None
    memory: float
    free: float


def cut_of(
    group: Group,
    tables: Tables,
    solution: Solution,
    schedule: Schedule,
    request: Request,
    *,
    always: float,
    expand: Expand,
    wanting: bool,
) -> Cut:
    """Return the best cuts of one solution on one group.

    `wanting`: the step without a limit of memory is wanted, too.
    """
    part = part_of(group, tables, solution, schedule, expand)
    (room,) = rooms_of([group], request, always)
    cutter, schedules = cutter_of((part,), [room], schedule, request)
    pipeline = cutter.best(schedules)
    if pipeline is None:
        return Cut(pipeline=None, memory=cutter.least_memory(schedules) + always, free=math.inf)
    free = pipeline.step
    # No schedule keeps `ROOMY` times as much in flight as another, so a roomy one is never short.
    if wanting and pipeline.memory > room / ROOMY:
        without_limit = cutter.unlimited().best(schedules)
        if without_limit is not None:
            free = min(free, without_limit.step)
    return Cut(pipeline=pipeline, memory=pipeline.memory, free=free)


def recut(
    staged: StagedProgram, solutions: Sequence[Solution], request: Request, *, always: float
) -> tuple[StagedProgram | None, float]:
    """Return the pipeline with other solutions of its parts, and bytes of the fullest device.

    The pipeline is None if no cut fits.
    """
    # Other solutions have other costs, so the cuts move, too.
    parts = tuple(
        part_of(part.group, part.tables, solution, staged.schedule)
        for part, solution in zip(staged.parts, solutions, strict=True)
    )
    rooms = rooms_of([part.group for part in parts], request, always)
    cutter, schedules = cutter_of(parts, rooms, staged.schedule, request)
    pipeline = cutter.best(schedules)
    if pipeline is None:
        return None, cutter.least_memory(schedules) + always
    return replace(staged, parts=parts, pipeline=pipeline), pipeline.memory


def _solutions(
    offered: Sequence[Tables], allowed: Sequence[float], request: Request
) -> list[Solution]:
    """Solve the tables of each group within so many bytes."""
    return [
        solve_within(tables, request.search, most)
        for tables, most in zip(offered, allowed, strict=True)
    ]


def _parts(
    groups: Sequence[Group],
    offered: Sequence[Tables],
    solutions: Sequence[Solution],
    schedule: Schedule,
    expand: Expand,
) -> tuple[Part, ...]:
    """Return the groups with their solutions."""
    return tuple(
        part_of(group, tables, solution, schedule, expand)
        for group, tables, solution in zip(groups, offered, solutions, strict=True)
    )


def _between(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [0.5 * (most + least) for most, least in zip(above, below, strict=True)]


def _used(parts: Sequence[Part], allowed: Sequence[float]) -> list[float]:
    """Return the bytes of its limit that each part's solution fills."""
    used = [part.tables.graph.memory_of(part.solution.choices) for part in parts]
    return [min(most, memory) for most, memory in zip(allowed, used, strict=True)]


def _tighter(groups: Sequence[Group], used: Sequence[float], excess: float) -> list[float]:
    """Return a limit for each group below what its solution used.

    `excess`: bytes by which the fullest device exceeds its memory, or 0 if that is not known.
    """
    if not excess:
        return [TIGHTER * most for most in used]
    return [
        max(most - SURE * excess * group.stages, TIGHTEST * most)
        for most, group in zip(used, groups, strict=True)
    ]
