"""The best pipeline on groups of devices: strategies solved, stages cut, both within the memory.

Each group is solved as if one of its stages held the whole model, with the memory of all its
stages. The cuts then give every stage a stretch of operators, with the strategies of its group. The
tables know the memory of all stages together only. So where no cut fits each device, the groups are
solved again within less memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.frameworks import OWN
from autopar.planning.model import Request
from autopar.planning.solve.within_limits import solve_within
from autopar.planning.tables import Tables
from autopar.planning.tables.requested import with_host_choices
from autopar.search import Infeasible, Solution
from autopar.sharding.schedule import Schedule

from .parts import Group, Part, Terms
from .stage import Pipeline, Slower
from .table_limits import TableLimits

TRIES = 5
"""How often the groups are solved until a cut fits, and the limit of their tables is near."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedProgram:
    """A pipeline: its parts in the order of their stages, and the cuts of the model.

    `tightened`: the first solution did not fit the memory of each device.
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


def best_pipeline(
    groups: Sequence[Group],
    offered: Sequence[Tables],
    terms: Terms,
    *,
    solved: Solution | None = None,
    too_slow: float = math.inf,
) -> StagedProgram:
    """Return the best pipeline on groups with their tables; raises `Infeasible` if no cut fits.

    `solved`: the solution of the only group within its memory, if it is known. `too_slow`: cuts
    that take so many seconds are left out; raises `Slower` if all do.
    """
    known = None if solved is None else [solved]
    return _fitting(groups, offered, terms, known=known, too_slow=too_slow)


def with_more_in_flight(staged: StagedProgram, request: Request, *, always: float) -> StagedProgram:
    """Return a pipeline under a faster schedule, if thriftier strategies admit one."""
    terms = Terms(request=request, schedule=staged.schedule, always=always)
    best = staged
    # Of one chunk a stage a schedule lacks least.
    for whole in (True, False):
        _, schedules = terms.cutter(best.parts)
        pairs = [pair for pair in schedules if (pair[1] == 1) == whole]
        step = best.pipeline.step
        best = thriftier_pipeline(best.parts, terms, pairs, too_slow=step) or best
    return best


def thriftier_pipeline(
    parts: Sequence[Part], terms: Terms, schedules: Iterable[tuple[str, int]], *, too_slow: float
) -> StagedProgram | None:
    """Return the best pipeline under those schedules that parts lack memory for.

    Such schedules keep more in flight, or keep it for longer, so that strategies have to be
    thriftier. State may be in host memory. None where nothing takes less than `too_slow` seconds.
    """
    cutter, _ = terms.cutter(parts)
    lacking = cutter.lacking(schedules, too_slow)
    if not lacking:
        return None
    groups = [part.group for part in parts]
    offered = [
        with_host_choices(terms.request, part.tables, part.group.stages / part.group.share)
        for part in parts
    ]
    try:
        thrifty = _fitting(groups, offered, terms, known=None, schedules=lacking, too_slow=too_slow)
    except (Infeasible, Slower):
        return None
    return thrifty if thrifty.pipeline.step < too_slow else None


def _fitting(
    groups: Sequence[Group],
    offered: Sequence[Tables],
    terms: Terms,
    *,
    known: Sequence[Solution] | None,
    schedules: Sequence[tuple[str, int]] | None = None,
    too_slow: float = math.inf,
) -> StagedProgram:
    """Return the best pipeline (under some schedules); raises as `best_pipeline`.

    `known`: the solutions of the groups that are tried first.
    """
    # The solution of a group is of the whole model, of which the group holds only its share.
    limits = TableLimits(
        groups, [group.stages * terms.room(group) / group.share for group in groups]
    )
    least = math.inf
    best: StagedProgram | None = None
    # The first pipeline that fits ends it; after failures a better one is looked for.
    for first in (True, *[False] * (TRIES - 1)):
        try:
            first_ones = known if first else None
            solutions = first_ones or _solutions(
                groups, offered, limits.allowed, terms.request, too_slow
            )
        except Infeasible as error:
            if first:
                raise
            # No solution is thriftier than the last one.
            if not limits.loosen(error.minimum_memory):
                break
            continue
        parts = _parts(groups, offered, solutions, terms)
        cutter, allowed = terms.cutter(parts)
        pairs = schedules or allowed
        pipeline = cutter.best(pairs, too_slow if first else math.inf)
        if pipeline is None:
            # How much is lacking says how much to save in the next solution.
            needed = cutter.least_memory(pairs)
            least = min(least, needed + terms.always)
            limits.tighten(parts, max(needed - min(map(terms.room, groups)), 0.0))
            continue
        if best is None or pipeline.step < best.pipeline.step:
            best = StagedProgram(
                parts=parts, pipeline=pipeline, schedule=terms.schedule, tightened=not first
            )
        # A first solution that fits is the tables' optimum; nothing is gained by more memory.
        if first or limits.fitting:
            break
        limits.approach()
    if best is not None:
        return best
    memory_limit = min(terms.request.memory_limit_on(group.cluster) for group in groups)
    raise Infeasible(max(least, math.nextafter(memory_limit, math.inf)), memory_limit)


def _without_waste(best: StagedProgram, terms: Terms) -> StagedProgram:
    """Return the same solutions without their recompute, where that needs no more memory.

    A short stage with little in flight holds at its peak what its layers make either way. Another
    framework runs what a mode says.
    """
    if not terms.schedule.recompute or terms.request.cluster.framework.name != OWN:
        return best
    schedule = replace(terms.schedule, recompute=())
    plain = replace(terms, schedule=schedule)
    parts = tuple(plain.part(part.group, part.tables, part.solution) for part in best.parts)
    cutter, schedules = plain.cutter(parts)
    pipeline = cutter.best(schedules)
    if pipeline is None or pipeline.memory > best.pipeline.memory:
        return best
    return replace(best, parts=parts, pipeline=pipeline, schedule=schedule)


def pipeline_of(group: Group, tables: Tables, solution: Solution, terms: Terms) -> StagedProgram:
    """Return the pipeline of a known solution on one group; raises `Infeasible` if no cut fits."""
    parts = (terms.part(group, tables, solution),)
    cutter, schedules = terms.cutter(parts)
    pipeline = cutter.best(schedules)
    if pipeline is None:
        limit = terms.request.memory_limit_on(group.cluster)
        needed = cutter.least_memory(schedules) + terms.always
        raise Infeasible(max(needed, math.nextafter(limit, math.inf)), limit)
    best = StagedProgram(parts=parts, pipeline=pipeline, schedule=terms.schedule)
    return _without_waste(best, terms)


def _solutions(
    groups: Sequence[Group],
    offered: Sequence[Tables],
    allowed: Sequence[float],
    request: Request,
    too_slow: float,
) -> list[Solution]:
    """Solve the tables of each group within so many bytes, as closely as these may be of use."""
    # Tables of several groups say little of a step: each is taken as if it had the whole model.
    alone = len(groups) == 1
    enough = too_slow * groups[0].stages / groups[0].share if alone else math.inf
    return [
        solve_within(tables, request.search, most, enough=enough)
        for tables, most in zip(offered, allowed, strict=True)
    ]


def _parts(
    groups: Sequence[Group], offered: Sequence[Tables], solutions: Sequence[Solution], terms: Terms
) -> tuple[Part, ...]:
    """Return the groups with their solutions."""
    return tuple(
        terms.part(group, tables, solution)
        for group, tables, solution in zip(groups, offered, solutions, strict=True)
    )
