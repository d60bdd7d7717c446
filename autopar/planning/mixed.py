"""Pipelines whose stages are not alike: on several kinds of devices, or on groups of unequal size where the devices do not divide evenly.

A stage of group k that held the whole model would take X_k. Work is shared so that all stages finish together: with p_k stages each,

    t = 1 / sum_k (p_k / X_k)        share of group k = t p_k / X_k        T = t (m + b) / m

orders the combinations of meshes; the best of them are solved and cut exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.costmodel.pipeline import in_flight
from autopar.costmodel.pricing import MeshPrices
from autopar.search import Infeasible, NoAssignment

from ..sharding.mesh import Mesh
from ..sharding.schedule import Schedule
from ..tables import Tables
from .candidates import meshes, micro_batch_counts, stage_counts
from .outer import FILLED, PLAIN_AXES, Mode, Outer
from .request import Request
from .staged import Group, Staged, staged
from .subject import Subject
from .work import Work

ScheduleOf = Callable[[Mode, int], Schedule]
"""The schedule of a mode with so many micro-batches."""
UNEVEN = 64
"""Devices of one kind up to which groups of unequal size are tried."""
SMALL_STAGES = 16
"""Stages of one group, at most."""
EXACT = 3
"""How many combinations are solved and cut exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Groups in the order of their stages, how many micro-batches they run, and the step that is expected."""

    groups: tuple[Group, ...]
    micro_batches: int
    seconds: float


class Mixed:
    """The unlike pipelines of a request."""

    def __init__(self, subject: Subject, request: Request) -> None:
        self.subject, self.request = subject, request

    def best(self, modes: Sequence[Mode], schedule_of: ScheduleOf, always: float) -> Staged | None:
        """The best of the most promising combinations, in the first mode that fits."""
        found: list[Staged] = []
        for combination in sorted(self.combinations(), key=lambda c: c.seconds)[:EXACT]:
            for mode in modes:
                try:
                    found.append(self._exact(combination, mode, schedule_of(mode, combination.micro_batches), always))
                    break
                except (Infeasible, NoAssignment):
                    continue
        return min(found, key=lambda s: s.rank, default=None)

    def pools(self) -> Iterator[tuple[tuple[Cluster, int], ...]]:
        """The groups of devices, each with the number of its first one, in the orders in which stages may lie on them."""
        cluster = self.request.cluster
        if cluster.joined:
            parts = tuple(zip(cluster.pools, cluster.starts, strict=True))
            yield from itertools.permutations(parts) if len(parts) <= 3 else (parts, parts[::-1])
            return
        power = 1 << (cluster.devices.bit_length() - 1)
        if 2 < cluster.devices <= UNEVEN and power < cluster.devices:
            rest = cluster.devices - power
            large, small = (cluster.part(0, power), 0), (cluster.part(power, rest), power)
            yield large, small
            yield small, large

    def combinations(self) -> Iterator[Combination]:
        """Every combination of stages and meshes of the groups."""
        if self.request.mesh is not None or self.request.micro_batches == 1 or self.subject.batch == 1:
            return
        known: dict[Cluster, list[tuple[int, Mesh, float]]] = {}
        for order in self.pools():
            for pool, _ in order:
                if pool not in known:
                    known[pool] = list(self._choices(pool))
            for chosen in itertools.product(*(known[pool] for pool, _ in order)):
                found = self._combined(order, chosen)
                if found is not None:
                    yield found

    def _choices(self, pool: Cluster) -> Iterator[tuple[int, Mesh, float]]:
        """Stages and mesh of a group, and the seconds of the whole model on one of these stages."""
        outer = Outer(self.subject, replace(self.request, cluster=pool))
        counts = [count for count in micro_batch_counts(self.subject.batch, 2) if self.subject.divides(count)]
        for stages in stage_counts(pool.devices, SMALL_STAGES - 1) if counts else ():
            for mesh in meshes(pool, stages, PLAIN_AXES):
                try:
                    yield stages, mesh, outer.base_seconds(pool.devices, stages, mesh, counts[0])
                except NoAssignment:
                    continue

    def _combined(self, order: Sequence[tuple[Cluster, int]], chosen: Sequence[tuple[int, Mesh, float]]) -> Combination | None:
        stages = sum(count for count, _, _ in chosen)
        if self.request.stages not in (None, stages):
            return None
        counts = [c for c in micro_batch_counts(self.subject.batch, stages) if self.request.micro_batches in (None, c)]
        counts = [count for count in counts if self.subject.divides(count)]
        if not counts:
            return None
        wanted = min(counts, key=lambda count: abs(math.log(count / (FILLED * stages))))
        rate = sum(count / seconds for count, _, seconds in chosen)
        groups = tuple(
            Group(cluster=pool, whole=self.request.cluster, start=start, stages=count, mesh=mesh, share=count / seconds / rate)
            for (pool, start), (count, mesh, seconds) in zip(order, chosen, strict=True)
        )
        return Combination(groups=groups, micro_batches=wanted, seconds=(wanted + stages - 1) / wanted / rate)

    def _exact(self, combination: Combination, mode: Mode, schedule: Schedule, always: float) -> Staged:
        request, count = self.request, combination.micro_batches
        stages = sum(group.stages for group in combination.groups)
        analysis = self.subject.analysis(short=False, micro_batches=count)
        work = Work(
            passes=count + stages - 1, in_flight=in_flight("1f1b", 0, stages, count), accumulating=count > 1, zero=mode.zero,
            segments=self.subject.segments(mode.recompute, short=False),
        )  # fmt: skip

        def tables(group: Group) -> Tables:
            prices = MeshPrices(cluster=group.cluster, mesh=group.mesh)
            return request.tables(analysis, prices, work, whole=count == 1)

        return staged(combination.groups, tables, schedule, request, always=always)
