"""The best pipeline on given groups of devices: strategies solved on the whole graph, stages cut, made to fit the memory.

A group holds equal stages on one kind of device. Each group is solved as if it held the whole model, with the memory that its share of the
model leaves; the cuts then give every stage a stretch of operators, with the strategies of its group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.search import Infeasible, Solution

from ..sharding.mesh import Mesh
from ..sharding.program import Assignment, Program, build_program
from ..sharding.schedule import Schedule
from .decoding import decode
from .operator_costs import OperatorCosts, operator_costs
from .pipeline_parts import Pipeline, Place, schedules_for
from .pipelines import Cutter
from .request import Request
from .solving import solve_within
from .tables import Tables

TRIES = 5
TIGHTER = 0.85
"""What the memory of all stages is multiplied by when no cut fits the stages one by one."""
SURE, TIGHTEST = 1.1, 0.7
"""What of its excess over the memory a pipeline's next solution has to save, and down to which share of what it uses."""
ROOMY = 4.0
"""How many times a pipeline has to fit the memory for it to be no question."""
AGAIN = 2
"""How often this is done for an interleaved schedule's sake."""

Expand = Callable[[OperatorCosts], OperatorCosts]
"""Figures of the model from those of the graph that was solved."""


def unfolded(figures: OperatorCosts) -> OperatorCosts:
    """The tables' graph is the model itself."""
    return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`stages` equal stages, each on a `mesh`, on devices `start` and following of the whole; `cluster` has as many devices.

    `whole`: the cluster through which stages reach those of other groups. `share`: of the model's work, that the group is to take.
    """

    cluster: Cluster
    whole: Cluster
    start: int
    stages: int
    mesh: Mesh
    share: float = 1.0

    def places(self) -> Iterator[Place]:
        """The devices of each stage."""
        count = self.mesh.devices
        for stage in range(self.stages):
            yield Place(cluster=self.whole, start=self.start + stage * count, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A group with its solution: what the whole model would be on one of its stages."""

    group: Group
    tables: Tables
    solution: Solution
    assignment: Assignment
    program: Program
    figures: OperatorCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedProgram:
    """A pipeline: the parts in the order of their stages, and where the model is cut; `tightened` as of `PricedProgram`."""

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
        """The part of every stage (of every chunk, where stages hold several)."""
        once = [part for part in self.parts for _ in range(part.group.stages)]
        return once * self.pipeline.interleave

    def part_of(self) -> dict[str, Part]:
        """The part of every operator."""
        operators = self.parts[0].tables.analysis.graph.operators
        pairs = zip(self.pipeline.stages, self.parts_of_stages, strict=True)
        return {op.name: part for stage, part in pairs for op in operators[stage.start : stage.stop]}

    @property
    def cost(self) -> float:
        """Seconds of a step as the tables add them up."""
        return sum(part.group.share * part.solution.cost / part.group.stages for part in self.parts) / len(self.parts)

    @property
    def memory(self) -> float:
        """Bytes of the fullest device at the peak."""
        return self.pipeline.memory

    @property
    def seconds(self) -> float:
        """Seconds of a step, those that differ by rounding alike."""
        return round(self.pipeline.step, 12)

    @property
    def rank(self) -> tuple[float, int, int]:
        """Order among candidates: time, then stages, then axes."""
        return (self.seconds, self.stages, len(self.parts[0].assignment.mesh.axes) + 1)


def best_pipeline(
    groups: Sequence[Group], tables: Callable[[Group], Tables], schedule: Schedule, request: Request, *, always: float,
    expand: Expand = unfolded, solved: Solution | None = None, too_slow: float = math.inf,
) -> StagedProgram:  # fmt: skip
    """The best pipeline on the groups, whose stages leave each device `always` bytes for inputs and constants; raises `Infeasible`.

    `expand`: makes the figures of the model from those of the tables' graph. `solved`: the solution of the one group within its memory,
    where it is known. `too_slow`: what takes so many seconds is not cut; raises `Slower` where that is all.
    """
    made = [tables(group) for group in groups]
    rooms = _rooms(groups, request, always)
    allowed = [group.stages * room / group.share for group, room in zip(groups, rooms, strict=True)]
    above, below, least = allowed, None, math.inf  # limits on the tables whose solutions cannot, and can, be cut
    best: StagedProgram | None = None
    for number in range(TRIES):
        try:
            known = (_part(groups[0], made[0], solved, schedule, expand),) if number == 0 and solved is not None else None
            parts = known or _parts(groups, made, allowed, schedule, request, expand)
        except Infeasible:
            if number == 0:
                raise
            allowed = _between(above, allowed)
            continue
        cutter, pairs = _cutter(parts, rooms, schedule, request)
        pipeline = cutter.best(pairs, too_slow if number == 0 else math.inf)
        if pipeline is None:
            needed = cutter.least_memory(pairs)
            least, above = min(least, needed + always), _used(parts, allowed)
            allowed = _between(above, below) if below else _tighter(groups, above, max(needed - min(rooms), 0.0))
            continue
        if best is None or pipeline.step < best.pipeline.step:
            best = StagedProgram(parts=parts, pipeline=pipeline, schedule=schedule, tightened=number > 0)
        if number == 0 or below:
            break
        below, allowed = allowed, _between(above, allowed)
    if best is not None:
        return best
    memory_limit = min(request.memory_limit_on(group.cluster) for group in groups)
    raise Infeasible(max(least, math.nextafter(memory_limit, math.inf)), memory_limit)


def _between(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [0.5 * (most + least) for most, least in zip(above, below, strict=True)]


def _used(parts: Sequence[Part], allowed: Sequence[float]) -> list[float]:
    """What the solutions fill of their limits."""
    used = [part.tables.graph.memory_of(part.solution.choices) for part in parts]
    return [min(most, memory) for most, memory in zip(allowed, used, strict=True)]


def _tighter(groups: Sequence[Group], used: Sequence[float], over: float) -> list[float]:
    """A limit for each group below what its solution used, where the fullest stage is so many bytes `over` its memory."""
    return [
        max(most - SURE * over * group.stages, TIGHTEST * most) if over else TIGHTER * most
        for most, group in zip(used, groups, strict=True)
    ]


def interleaved(found: StagedProgram, request: Request, *, always: float) -> StagedProgram:
    """Retry with lower-memory strategies if these admit a faster interleaved schedule, which keeps more in flight."""
    best, parts = found, found.parts
    groups = [part.group for part in parts]
    made = [request.offering(part.tables, part.group.stages / part.group.share) for part in parts]
    rooms = _rooms(groups, request, always)
    allowed = [math.inf] * len(parts)
    cutter, pairs = _cutter(parts, rooms, found.schedule, request)
    for _ in range(AGAIN):
        if not cutter.could_be_faster(pairs, best.pipeline):
            break
        allowed = _tighter(groups, _used(parts, allowed), 0.0)
        try:
            parts = _parts(groups, made, allowed, found.schedule, request, unfolded)
        except Infeasible:
            break
        cutter, pairs = _cutter(parts, rooms, found.schedule, request)
        pipeline = cutter.best(pairs)
        if pipeline is not None and pipeline.step < best.pipeline.step:
            best = StagedProgram(parts=parts, pipeline=pipeline, schedule=found.schedule, tightened=True)
    return best


def pipeline_of(
    group: Group, tables: Tables, solution: Solution, schedule: Schedule, request: Request, *, always: float
) -> StagedProgram | None:
    """The pipeline of a known solution on one group (None: no cut fits)."""
    parts = (_part(group, tables, solution, schedule, unfolded),)
    cutter, schedules = _cutter(parts, _rooms([group], request, always), schedule, request)
    pipeline = cutter.best(schedules)
    return None if pipeline is None else StagedProgram(parts=parts, pipeline=pipeline, schedule=schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A solution at its best cuts (None: none fits), the bytes of the fullest device, and the step where no memory is short."""

    pipeline: Pipeline | None
    memory: float
    free: float


def cut_of(
    group: Group, tables: Tables, solution: Solution, schedule: Schedule, request: Request, *, always: float, expand: Expand, wanting: bool
) -> Cut:
    """The best cuts of one solution on one group; `wanting`: where no memory is short, too."""
    part, (room,) = _part(group, tables, solution, schedule, expand), _rooms([group], request, always)
    cutter, schedules = _cutter((part,), [room], schedule, request)
    pipeline = cutter.best(schedules)
    if pipeline is None:
        return Cut(pipeline=None, memory=cutter.least_memory(schedules) + always, free=math.inf)
    # No schedule keeps so many times more in flight than another.
    free = cutter.unlimited().best(schedules) if wanting and pipeline.memory > room / ROOMY else pipeline
    return Cut(pipeline=pipeline, memory=pipeline.memory, free=min(pipeline.step, free.step) if free is not None else pipeline.step)


def recut(found: StagedProgram, solutions: Sequence[Solution], request: Request, *, always: float) -> tuple[StagedProgram | None, float]:
    """The pipeline with other solutions of its parts (None: no cut fits), and bytes of the fullest device."""
    pairs = zip(found.parts, solutions, strict=True)
    parts = tuple(_part(part.group, part.tables, solution, found.schedule, unfolded) for part, solution in pairs)
    cutter, schedules = _cutter(parts, _rooms([part.group for part in parts], request, always), found.schedule, request)
    pipeline = cutter.best(schedules)
    if pipeline is None:
        return None, cutter.least_memory(schedules) + always
    return replace(found, parts=parts, pipeline=pipeline), pipeline.memory


def _rooms(groups: Sequence[Group], request: Request, always: float) -> list[float]:
    return [max(request.memory_limit_on(group.cluster) - always, 0.0) for group in groups]


def _parts(
    groups: Sequence[Group], made: Sequence[Tables], allowed: Sequence[float], schedule: Schedule, request: Request, expand: Expand
) -> tuple[Part, ...]:
    solved = zip(groups, made, allowed, strict=True)
    return tuple(_part(group, table, solve_within(table, request.method, most), schedule, expand) for group, table, most in solved)


def _part(group: Group, tables: Tables, solution: Solution, schedule: Schedule, expand: Expand) -> Part:
    assignment = decode(tables, solution.choices)
    program = build_program(tables.analysis.graph, assignment)
    figures = operator_costs(program, tables.analysis, tables.prices, optimizer=tables.optimizer, schedule=schedule)
    return Part(group=group, tables=tables, solution=solution, assignment=assignment, program=program, figures=expand(figures))


def _cutter(parts: Sequence[Part], rooms: Sequence[float], schedule: Schedule, request: Request) -> tuple[Cutter, list[tuple[str, int]]]:
    """What cuts the model on these parts, and the schedules that the request leaves."""
    figures = list(itertools.chain.from_iterable([part.figures] * part.group.stages for part in parts))
    limits = list(itertools.chain.from_iterable([room] * part.group.stages for part, room in zip(parts, rooms, strict=True)))
    places = list(itertools.chain.from_iterable(part.group.places() for part in parts))
    hosts = [request.host_on(part.group.cluster) for part in parts for _ in range(part.group.stages)]
    cutter = Cutter(figures, places, limits, schedule.micro_batches, hosts, schedule.unit_bytes)
    stages, pieces = len(places), len(cutter.pieces) - 1
    fixed = schedules_for(stages, schedule.micro_batches, pieces=pieces, pipeline=request.pipeline, interleave=request.interleave)
    return cutter, list(fixed)
