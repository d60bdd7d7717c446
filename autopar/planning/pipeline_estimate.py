"""The expected step of a pipeline before its stages are cut: that of the fastest schedule that fits the memory.

    T_s = [ (m + b_s) X + G ] / p        if stored + f_s saved fits

A solution's tables add up to (m + b) X + G seconds and stored + f saved bytes. X: seconds of a pass of one of the m
micro-batches. G: seconds of the work once a step. saved: bytes of a micro-batch in flight. p: stages. Each schedule s
has a bubble b_s and, from its order, f_s micro-batches in flight (`autopar.order.schedules`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.costmodel.device.operators import operator_parts
from autopar.costmodel.memory.saved_values import kept_values
from autopar.costmodel.step.pricing import MeshPrices
from autopar.order.schedules import SCHEDULES, in_flight
from autopar.search import Solution

from ..ir import Role
from ..sharding.analysis import Analysis
from ..sharding.mesh import Mesh
from .building import build_tables
from .multiplicities import Counts, Multiplicities
from .operator_tables import kept_bytes
from .tables import Tables

Schedules = Sequence[tuple[str, int]]
"""Pairs of a schedule and its chunks a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEstimate:
    """Seconds of a step under the fastest schedule that fits; `short`: whether a faster one does not fit."""

    seconds: float
    short: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """A pipeline of `stages` that runs `micro_batches`.

    `weight`: the share of a pass that computes gradients of weights. `share`: the share of a core that a rank has (see
    `costmodel/step/host_share.py`).
    """

    stages: int
    micro_batches: int
    weight: float
    share: float = 1.0

    def bubble(self, schedule: str, chunks: int = 1) -> float:
        """The bubble in passes; on shared cores, only the passes by which it makes the step longer."""
        waited = SCHEDULES[schedule].bubble(self.stages, self.weight, chunks)
        return waited if self.share == 1.0 else max(self.share * (self.micro_batches + waited) - self.micro_batches, 0.0)

    def least_bubble(self, schedules: Schedules) -> float:
        """The bubble of the schedule with the least one."""
        return min((self.bubble(*schedule) for schedule in schedules), default=self.stages - 1.0)

    def expected(self, tables: Tables, solution: Solution, work: Multiplicities, schedules: Schedules, room: float) -> PipelineEstimate:
        """The expected step of a solution; `room`: bytes of all stages together."""
        # The tables' sums, taken apart and put together again with each schedule's bubble and micro-batches.
        each = _pass_seconds(tables, solution, work)
        once = solution.cost - work.passes * each
        saved = _saved(tables, solution, work)
        stored = solution.memory - work.in_flight * saved
        found: list[tuple[float, bool]] = []
        for schedule, chunks in schedules:
            flying = in_flight(schedule, 0, self.stages, self.micro_batches, chunks)
            seconds = (self.micro_batches + self.bubble(schedule, chunks)) * each + once
            found.append((seconds / self.stages, stored + flying * saved <= room))
        best = min((seconds for seconds, fits in found if fits), default=solution.cost / self.stages)
        return PipelineEstimate(seconds=best, short=min(seconds for seconds, _ in found) < best)


def _pass_seconds(tables: Tables, solution: Solution, work: Multiplicities) -> float:
    """Seconds of a pass of one micro-batch, including the parameters' collectives that every pass has (ZeRO 3: all)."""
    choices, variables, tensors = solution.choices, tables.variables, tables.analysis.graph.tensors
    stored = [v.what == "parameter" or (v.what == "fan-out" and tensors[v.name].role is Role.PARAMETER) for v in variables]
    own = (float(unary[c]) for v, unary, c in zip(variables, tables.graph.unary, choices, strict=True) if v.what == "operator")
    moved = (
        float(table[choices[u], choices[v]])
        for (u, v), table in tables.graph.edges.items()
        if work.zero == 3 or not stored[u]
    )
    gradients = math.fsum(float(table[choices[u], choices[v]]) for (u, v), table in tables.each.items()) if work.zero != 3 else 0.0
    return (math.fsum(own) + math.fsum(moved)) / work.passes + gradients


def _saved(tables: Tables, solution: Solution, work: Multiplicities) -> float:
    """Bytes saved of a micro-batch from its forward to its backward pass."""
    kept, total = kept_values(tables.analysis, work.segments), []
    for variable, choice in zip(tables.variables, solution.choices, strict=True):
        shares = [share for share in kept.shares.get(variable.name, ()) if not share.weight] if variable.what == "operator" else []
        if shares:
            strategies = tables.strategies[variable.name]
            row = int(variable.rows[choice])
            taken = replace(strategies, choices=strategies.choices[row : row + 1])
            count = work.counts.operators.get(variable.name, 1)
            total.append(count * float(kept_bytes(taken, tables.prices.mesh.shape, shares)[0]))
    return math.fsum(total)


def tables_alone(analysis: Analysis, cluster: Cluster, counts: Counts) -> tuple[Tables, Multiplicities]:
    """The tables of a step on one device without limits, and their multiplicities."""
    work = Multiplicities(counts=counts)
    alone = MeshPrices(cluster=cluster.sized(1), mesh=Mesh(axes=()))
    return build_tables(analysis, alone, optimizer="none", work=work), work


def weight_share(tables: Tables, work: Multiplicities) -> float:
    """The share of a pass that computes gradients of weights, on one device."""
    passed = weights = 0.0
    for op in tables.analysis.warm:
        offer, count = tables.analysis.offers[op.name], work.counts.operators.get(op.name, 1)
        gradients = tables.analysis.as_offered(op, tables.analysis.gradients)
        parts = operator_parts(offer.call, tables.strategies[op.name], (), tables.prices.cluster, gradients)
        passed += count * float(parts.forward[0] + parts.backward[0])
        weights += count * float(parts.weight[0])
    return weights / passed if passed else 0.0
