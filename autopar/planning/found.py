"""A solution as a program with its exact price, made to fit the memory where the tables' sums were too hopeful."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.costmodel.step.estimate import Estimate, estimate
from autopar.costmodel.step.pricing import LEAST_UNIT
from autopar.search import Infeasible, Solution

from ..decoding import decode
from ..order.scheduled import Scheduled, scheduled
from ..sharding.program import Assignment, Program, build_program
from ..sharding.schedule import PLAIN, Schedule
from ..tables import Tables
from .solving import EXACT_METHOD, QUICK_METHOD, solve_within

MEMORY_TRIES = 6
"""How often the search's limit is lowered when the program's exact memory is above what the tables added up to."""
MOSTLY = 0.8
"""Share of the reduction of gradients that counts as most of it."""
SMALLER = 4
"""By how much units of parameters shrink where the program needs too much memory."""
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
    def rank(self) -> tuple[float, int, int]:
        """Order among meshes: time, then collectives, then axes."""
        return (round(self.estimate.step, 12), len(self.plan.collectives()), len(self.assignment.mesh.axes))


def evaluate(tables: Tables, solution: Solution, schedule: Schedule = PLAIN) -> Found:
    """Decode a solution and price its program."""
    assignment = decode(tables, solution.choices)
    plan = scheduled(build_program(tables.analysis.graph, assignment), schedule)
    figures = estimate(plan, tables.analysis, tables.prices, optimizer=tables.optimizer)
    return Found(tables=tables, solution=solution, assignment=assignment, plan=plan, estimate=figures)


def _thriftier(found: Found, limit: float) -> Found:
    """The same solution with smaller units of parameters, of which less is there at once, until it fits or that is no help."""
    while found.memory > limit and found.schedule.unit_bytes > LEAST_UNIT:
        schedule = replace(found.schedule, unit_bytes=max(found.schedule.unit_bytes // SMALLER, LEAST_UNIT))
        other = evaluate(found.tables, found.solution, schedule)
        if other.memory >= found.memory:
            break
        found = other
    return found


def fit(tables: Tables, solution: Solution, *, method: str, limit: float, schedule: Schedule = PLAIN) -> Found:
    """The program of a solution; where it needs more memory than the tables added up to, that of a thriftier solution."""
    allowed = limit
    for number in range(MEMORY_TRIES):
        found = _thriftier(evaluate(tables, solution, schedule), limit)
        over = found.estimate.memory.total - limit
        if over <= 0:
            return replace(found, tightened=number > 0)
        allowed = min(allowed, tables.graph.memory_of(solution.choices)) - over
        try:
            solution = solve_within(tables, method, allowed)
        except Infeasible:
            break
    return smallest(tables, method=method, limit=limit, schedule=schedule)


def smallest(tables: Tables, *, method: str, limit: float, schedule: Schedule = PLAIN) -> Found:
    """The plan of least memory, or the first that fits; `Infeasible` if none does.

    The tables add memory up operator by operator, the program has its peak at one moment: thrifty solutions are tried in turn, which
    need not be the fastest of their memory.
    """
    method = QUICK_METHOD if method == EXACT_METHOD else method
    try:
        solution = solve_within(tables, method, 0.0)
        limits: tuple[float, ...] = ()
    except Infeasible as error:
        limits = tuple(error.minimum_memory * factor for factor in THRIFTY)
        solution = solve_within(tables, method, limits[0])
    found = _thriftier(evaluate(tables, solution, schedule), limit)
    for tried in limits[1:]:
        if found.estimate.memory.total <= limit:
            break
        other = _thriftier(evaluate(tables, solve_within(tables, method, tried), schedule), limit)
        found = min(found, other, key=lambda f: f.estimate.memory.total)
    if found.estimate.memory.total <= limit:
        return replace(found, tightened=True)
    raise Infeasible(found.estimate.memory.total, limit)


def best_within(tables: Tables, *, method: str, limit: float, room: float, schedule: Schedule = PLAIN) -> Found:
    """The best program within `limit`, of which the tables may fill `room`."""
    try:
        return fit(tables, solve_within(tables, method, room), method=method, limit=limit, schedule=schedule)
    except Infeasible:
        if math.isinf(limit):
            raise
        return smallest(tables, method=method, limit=limit, schedule=schedule)
