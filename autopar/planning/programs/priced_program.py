"""Solutions as programs with their exact price, made to fit the memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.costmodel.frameworks import OWN
from autopar.costmodel.memory.peak import Memory, predicted_memory
from autopar.costmodel.step.estimate import Estimate, estimate_of, timeline
from autopar.costmodel.step.mesh_prices import LEAST_UNIT
from autopar.costmodel.step.timeline import Timeline
from autopar.order.scheduled import Scheduled, scheduled
from autopar.planning.solve.within_limits import quick_method, solve_within
from autopar.planning.tables import Tables, decode
from autopar.search import Infeasible, Solution
from autopar.sharding.program import Assignment, Program
from autopar.sharding.program_builder import build_program
from autopar.sharding.schedule import PLAIN, Schedule

SMALLER = 4
"""The divisor of the units of parameters while the program needs too much memory."""
THRIFTY = (1 + 1e-9, 1.1, 1.25, 1.5, 2.0)
"""Limits to solve under, as multiples of the tables' least memory; the program of least memory is
taken.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedProgram:
    """The best program on one mesh, without pipeline stages."""

    tables: Tables
    solution: Solution
    assignment: Assignment
    plan: Scheduled
    estimate: Estimate

    @property
    def program(self) -> Program:
        """The program of the step, or of one micro-batch."""
        return self.plan.program

    @property
    def schedule(self) -> Schedule:
        """The schedule of the program."""
        return self.plan.schedule

    @property
    def memory(self) -> float:
        """Bytes of a device at the peak."""
        return self.estimate.memory.total

    @property
    def seconds(self) -> float:
        """Seconds of a step, rounded so that equal steps compare as equal."""
        return round(self.estimate.step, 12)

    @property
    def rank(self) -> tuple[float, int, int]:
        """The order among meshes: time, then collectives, then axes."""
        return (self.seconds, len(self.plan.collectives()), len(self.assignment.mesh.axes))


# Without slots, as its memory and its timeline are made when they are first asked for: each takes
# longer than the program itself, and most programs need only one of them.
@dataclass(frozen=True, kw_only=True, eq=False)
class DraftProgram:
    """A solution's program, of which memory and timeline are known on demand."""

    tables: Tables
    solution: Solution
    plan: Scheduled

    @staticmethod
    def of(tables: Tables, solution: Solution, schedule: Schedule) -> DraftProgram:
        """Decode a solution; recompute that saves nothing at the peak is left out."""
        return DraftProgram.decoded(tables, solution, schedule).without_waste()

    @staticmethod
    def decoded(tables: Tables, solution: Solution, schedule: Schedule) -> DraftProgram:
        """Decode a solution, with all the recompute of the schedule."""
        program = build_program(tables.analysis.graph, decode(tables, solution.choices))
        return DraftProgram(tables=tables, solution=solution, plan=scheduled(program, schedule))

    def without_waste(self) -> DraftProgram:
        """The same program without its recompute, if that saves nothing at the peak.

        Another framework runs what a mode says.
        """
        schedule = self.plan.schedule
        if not schedule.recompute or self.tables.prices.cluster.framework.name != OWN:
            return self
        # Each recomputed segment holds its inputs to its end, which small ones do not earn.
        plain = self.under(replace(schedule, recompute=()))
        return plain if plain.memory.total <= self.memory.total else self

    @cached_property
    def memory(self) -> Memory:
        """The memory of a device at the peak."""
        tables = self.tables
        return predicted_memory(
            self.plan,
            tables.analysis,
            optimizer=tables.optimizer,
            composite=tables.prices.cluster.backend == "gloo",
            framework=tables.prices.cluster.framework,
        )

    @cached_property
    def timeline(self) -> Timeline:
        """The step, played on the streams of a device."""
        tables = self.tables
        return timeline(self.plan, tables.analysis, tables.prices, optimizer=tables.optimizer)

    def under(self, schedule: Schedule) -> DraftProgram:
        """The same program under another schedule."""
        return replace(self, plan=scheduled(self.plan.program, schedule))

    def priced(self) -> PricedProgram:
        """The program with its price."""
        tables = self.tables
        figures = estimate_of(
            self.plan, tables.prices, tables.optimizer, self.timeline, self.memory
        )
        return PricedProgram(
            tables=tables,
            solution=self.solution,
            assignment=self.plan.program.assignment,
            plan=self.plan,
            estimate=figures,
        )


def evaluate(tables: Tables, solution: Solution, schedule: Schedule = PLAIN) -> PricedProgram:
    """Return the exact program of a solution, priced to the last collective."""
    return DraftProgram.of(tables, solution, schedule).priced()


def thriftier(draft: DraftProgram, memory_limit: float) -> DraftProgram:
    """The same solution with smaller units of parameters, until it fits or they save nothing.

    Smaller units keep fewer bytes on their way at once. They leave the values of the passes where
    they are, so that a program which is too large without what is on its way stays as it is.
    """
    while (
        draft.memory.total > memory_limit
        and draft.memory.total - draft.memory.travelling <= memory_limit
        and (unit := draft.plan.schedule.unit_bytes) > LEAST_UNIT
    ):
        smaller = max(unit // SMALLER, LEAST_UNIT)
        other = draft.under(replace(draft.plan.schedule, unit_bytes=smaller))
        # Smaller units are more segments, each of which holds what it is given.
        if other.memory.total >= draft.memory.total:
            break
        draft = other
    return draft


def smallest(
    tables: Tables, *, method: str, memory_limit: float, schedule: Schedule = PLAIN
) -> PricedProgram:
    """Return the first program that fits, of several solutions of little memory.

    Raises `Infeasible` if none does.

    The tables add memory up operator by operator, but the program has its peak at one moment. So
    the solution of least memory need not be the program of least memory. Equal solutions are tried
    once. If the parameters alone exceed the limit, only the first solution is tried, for the
    message.
    """
    method = quick_method(method)
    try:
        solution = solve_within(tables, method, 0.0)
        limits: tuple[float, ...] = ()
    except Infeasible as error:
        limits = tuple(error.minimum_memory * factor for factor in THRIFTY)
        solution = solve_within(tables, method, limits[0])
    best = thriftier(DraftProgram.of(tables, solution, schedule), memory_limit)
    seen = {solution.choices}
    for tried in limits[1:] if tables.least_stored() <= memory_limit else ():
        if best.memory.total <= memory_limit:
            break
        solution = solve_within(tables, method, tried)
        if solution.choices not in seen:
            seen.add(solution.choices)
            best = min(
                best,
                thriftier(DraftProgram.of(tables, solution, schedule), memory_limit),
                key=lambda draft: draft.memory.total,
            )
    if best.memory.total <= memory_limit:
        return best.priced()
    raise Infeasible(best.memory.total, memory_limit)
