"""A solution as a program with its exact price, made to fit the memory where the tables' sums were too hopeful."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.costmodel.memory.peak import Memory, predicted_memory
from autopar.costmodel.step.estimate import Estimate, estimate
from autopar.costmodel.step.pricing import LEAST_UNIT
from autopar.search import Infeasible, Solution

from ..order.scheduled import Scheduled, scheduled
from ..sharding.program import Assignment, Program, build_program
from ..sharding.schedule import PLAIN, Schedule
from .decoding import decode
from .solving import EXACT_METHOD, QUICK_METHOD, solve_within
from .tables import Tables

MEMORY_TRIES = 6
"""How often the search's limit is lowered when the program's exact memory is above what the tables added up to."""
MOSTLY = 0.8
"""Share of the reduction of gradients that counts as most of it."""
SMALLER = 4
"""By how much units of parameters shrink where the program needs too much memory."""
HOPELESS = 1.5
"""A program that needs so many times the limit with the smallest units is not tried with others."""
THRIFTY = (1 + 1e-9, 1.1, 1.25, 1.5, 2.0)
"""Limits, as multiples of the least memory that the tables add up to, among whose solutions the thriftiest program is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best choice on one mesh, without pipeline stages; `tightened`: the memory of the tables' own solution was too much."""

    tables: Tables
    solution: Solution
    assignment: Assignment
    plan: Scheduled
    estimate: Estimate
    tightened: bool = False

    @property
    def program(self) -> Program:
        """Its program (with micro-batches, of one of them)."""
        return self.plan.program

    @property
    def schedule(self) -> Schedule:
        """When its work is done."""
        return self.plan.schedule

    @property
    def hides_reductions(self) -> bool:
        """Whether most of the sums of gradients as they are stored run under the backward pass, or there are none."""
        prices = self.tables.prices
        total = sum(prices.seconds("all_reduce", axis, bucket.nbytes) for bucket in self.plan.buckets for axis in bucket.axes)
        return self.estimate.overlapped >= MOSTLY * total

    @property
    def memory(self) -> float:
        """Bytes of a device at the peak."""
        return self.estimate.memory.total

    @property
    def seconds(self) -> float:
        """Seconds of a step, those that differ by rounding alike."""
        return round(self.estimate.step, 12)

    @property
    def rank(self) -> tuple[float, int, int]:
        """Order among meshes: time, then collectives, then axes."""
        return (self.seconds, len(self.plan.collectives()), len(self.assignment.mesh.axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A solution's program with its memory, before its timeline is played."""

    tables: Tables
    solution: Solution
    program: Program
    plan: Scheduled
    memory: Memory

    @staticmethod
    def of(tables: Tables, solution: Solution, schedule: Schedule) -> Draft:
        """Decode a solution, and find out what its program needs."""
        return _drafted(tables, solution, build_program(tables.analysis.graph, decode(tables, solution.choices)), schedule)

    def under(self, schedule: Schedule) -> Draft:
        """The same program under another schedule."""
        return _drafted(self.tables, self.solution, self.program, schedule)

    def priced(self, *, tightened: bool = False) -> Found:
        """The program with its price."""
        tables = self.tables
        figures = estimate(self.plan, tables.analysis, tables.prices, optimizer=tables.optimizer, memory=self.memory)
        return Found(
            tables=tables, solution=self.solution, assignment=self.program.assignment, plan=self.plan, estimate=figures, tightened=tightened
        )  # fmt: skip


def _drafted(tables: Tables, solution: Solution, program: Program, schedule: Schedule) -> Draft:
    plan = scheduled(program, schedule)
    memory = predicted_memory(plan, tables.analysis, optimizer=tables.optimizer, composite=tables.prices.cluster.backend == "gloo")
    return Draft(tables=tables, solution=solution, program=program, plan=plan, memory=memory)


def evaluate(tables: Tables, solution: Solution, schedule: Schedule = PLAIN) -> Found:
    """Decode a solution and price its program."""
    return Draft.of(tables, solution, schedule).priced()


def thriftier(draft: Draft, limit: float) -> Draft:
    """The same solution with smaller units of parameters, of which less is there at once, until it fits or that is no help."""
    unit = draft.plan.schedule.unit_bytes
    if draft.memory.total > limit and unit > LEAST_UNIT:
        least = draft.under(replace(draft.plan.schedule, unit_bytes=LEAST_UNIT))
        if least.memory.total > HOPELESS * limit:
            return least
    while draft.memory.total > limit and (unit := draft.plan.schedule.unit_bytes) > LEAST_UNIT:
        smaller = max(unit // SMALLER, LEAST_UNIT)
        other = least if smaller == LEAST_UNIT else draft.under(replace(draft.plan.schedule, unit_bytes=smaller))
        if other.memory.total >= draft.memory.total:
            break
        draft = other
    return draft


def fit(tables: Tables, solution: Solution, *, method: str, limit: float, schedule: Schedule = PLAIN) -> Found:
    """The program of a solution; where it needs more memory than the tables added up to, that of a thriftier solution."""
    allowed = limit
    for number in range(MEMORY_TRIES):
        draft = thriftier(Draft.of(tables, solution, schedule), limit)
        over = draft.memory.total - limit
        if over <= 0:
            return draft.priced(tightened=number > 0)
        allowed = min(allowed, tables.graph.memory_of(solution.choices)) - over
        try:
            solution = solve_within(tables, method, allowed)
        except Infeasible:
            break
    return smallest(tables, method=method, limit=limit, schedule=schedule)


def smallest(tables: Tables, *, method: str, limit: float, schedule: Schedule = PLAIN) -> Found:
    """The plan of least memory, or the first that fits; `Infeasible` if none does.

    The tables add memory up operator by operator, the program has its peak at one moment: thrifty solutions are tried in turn, which
    need not be the fastest of their memory. What none of them changes is looked at once; where no program can fit, only the first is.
    """
    method = QUICK_METHOD if method == EXACT_METHOD else method
    try:
        solution = solve_within(tables, method, 0.0)
        limits: tuple[float, ...] = ()
    except Infeasible as error:
        limits = tuple(error.minimum_memory * factor for factor in THRIFTY)
        solution = solve_within(tables, method, limits[0])
    best, seen = thriftier(Draft.of(tables, solution, schedule), limit), {solution.choices}
    for tried in limits[1:] if tables.least_stored() <= limit else ():
        if best.memory.total <= limit:
            break
        solution = solve_within(tables, method, tried)
        if solution.choices not in seen:
            seen.add(solution.choices)
            best = min(best, thriftier(Draft.of(tables, solution, schedule), limit), key=lambda draft: draft.memory.total)
    if best.memory.total <= limit:
        return best.priced(tightened=True)
    raise Infeasible(best.memory.total, limit)


def best_within(tables: Tables, *, method: str, limit: float, room: float, schedule: Schedule = PLAIN) -> Found:
    """The best program within `limit`, of which the tables may fill `room`."""
    try:
        return fit(tables, solve_within(tables, method, room), method=method, limit=limit, schedule=schedule)
    except Infeasible:
        if math.isinf(limit):
            raise
        return smallest(tables, method=method, limit=limit, schedule=schedule)
