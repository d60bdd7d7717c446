"""The expected step of a pipeline before its stages are cut, under the fastest schedule that fits.

    T_s = [ (m + b_s) X + G ] / p        if stored + f_s saved fits

A solution's tables add up to (m + b) X + G seconds and stored + f saved bytes, with

    X      seconds of a pass of one of the m micro-batches
    G      seconds of the work once a step
    saved  bytes of a micro-batch in flight
    p      stages
    b_s    bubble of schedule s, in passes
    f_s    micro-batches that it has in flight, from its order (`autopar.order.schedules`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.memory.saved_values import saved_values
from autopar.ir import Role
from autopar.order.schedules import SCHEDULES, in_flight
from autopar.planning.space import Multiplicities
from autopar.planning.tables import Tables
from autopar.planning.tables.operators import share_bytes
from autopar.planning.tables.tables import Variable
from autopar.search import Solution

Schedules = Sequence[tuple[str, int]]
"""Pairs of a schedule and its chunks a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Seconds of a step under the fastest schedule that fits.

    `short`: whether a faster schedule does not fit.
    """

    seconds: float
    short: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The sums of a solution's tables, taken apart.

    `each`: seconds of a pass of one micro-batch. `once`: of the work once a step. `saved`: bytes of
    a micro-batch in flight. `stored`: all other bytes.
    """

    each: float
    once: float
    saved: float
    stored: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """A pipeline of `stages` that runs `micro_batches`.

    `weight`: the share of a pass that computes gradients of weights. `share`: the share of a core
    that a rank has (see `costmodel/step/shared_cores.py`).
    """

    stages: int
    micro_batches: int
    weight: float
    share: float = 1.0

    def bubble(self, schedule: str, chunks: int = 1) -> float:
        """Return the bubble of a schedule, in passes."""
        waited = SCHEDULES[schedule].bubble(self.stages, self.weight, chunks)
        if self.share == 1.0:
            return waited
        # On shared cores others compute while a rank waits, so only what makes the step longer is
        # lost.
        return max(self.share * (self.micro_batches + waited) - self.micro_batches, 0.0)

    def least_bubble(self, schedules: Schedules) -> float:
        """Return the least bubble of these schedules, in passes."""
        return min((self.bubble(*schedule) for schedule in schedules), default=self.stages - 1.0)

    def expected(
        self, sums: Sums, solution: Solution, schedules: Schedules, room: float
    ) -> StepEstimate:
        """Return the expected step of a solution within `room` bytes of all stages together."""
        # The tables' sums are put together again with each schedule's bubble and micro-batches in
        # flight.
        fitting = []
        fastest = math.inf
        for schedule, chunks in schedules:
            # The first stage keeps most in flight.
            flying = in_flight(schedule, 0, self.stages, self.micro_batches, chunks)
            passes = self.micro_batches + self.bubble(schedule, chunks)
            seconds = (passes * sums.each + sums.once) / self.stages
            fastest = min(fastest, seconds)
            if sums.stored + flying * sums.saved <= room:
                fitting.append(seconds)
        best = min(fitting, default=solution.cost / self.stages)
        return StepEstimate(seconds=best, short=fastest < best)


def sums_of(tables: Tables, solution: Solution, work: Multiplicities) -> Sums:
    """Return the sums of a pipeline's tables, taken apart."""
    each = pass_seconds(tables, solution, work)
    saved = saved_bytes(tables, solution, work)
    return Sums(
        each=each,
        once=solution.cost - work.passes * each,
        saved=saved,
        stored=solution.memory - work.in_flight * saved,
    )


def pass_seconds(tables: Tables, solution: Solution, work: Multiplicities) -> float:
    """Return the seconds of a pass of one micro-batch.

    They include the collectives of parameters that every pass has: under ZeRO 3 all of them.
    """
    choices = solution.choices
    graph = tables.graph
    own = []
    for variable, seconds, choice in zip(tables.variables, graph.unary, choices, strict=True):
        if variable.what == "operator":
            own.append(float(seconds[choice]))
    moved = []
    for (u, v), table in graph.edges.items():
        if work.zero == 3 or not _carries_parameter(tables, tables.variables[u]):
            moved.append(float(table[choices[u], choices[v]]))
    gradients = 0.0
    if work.zero != 3:
        gradients = math.fsum(
            float(table[choices[u], choices[v]]) for (u, v), table in tables.each.items()
        )
    return (math.fsum(own) + math.fsum(moved)) / work.passes + gradients


def _carries_parameter(tables: Tables, variable: Variable) -> bool:
    """Return whether a variable is the storage of a parameter, or the fan-out of one."""
    if variable.what == "parameter":
        return True
    tensors = tables.analysis.graph.tensors
    return variable.what == "fan-out" and tensors[variable.name].role is Role.PARAMETER


def saved_bytes(tables: Tables, solution: Solution, work: Multiplicities) -> float:
    """Return the bytes saved of a micro-batch from its forward to its backward pass."""
    saved = saved_values(tables.analysis, work.segments, tables.prices.cluster.framework.saving)
    total = []
    for variable, choice in zip(tables.variables, solution.choices, strict=True):
        row = int(variable.rows[choice])
        for name in variable.members:
            shares = [share for share in saved.shares.get(name, ()) if not share.weight]
            if shares:
                strategies = tables.strategies[name]
                taken = replace(strategies, choices=strategies.choices[row : row + 1])
                count = work.counts.operators.get(name, 1)
                total.append(count * float(share_bytes(taken, tables.prices.mesh.shape, shares)[0]))
    return math.fsum(total)
