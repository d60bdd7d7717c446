"""Pipelines whose stages are not alike: on several kinds of devices, or on groups of unequal size where the devices do not divide evenly.

A stage of group k that held the whole model would take X_k. Work is shared so that all stages finish together: with p_k stages each,

    t = 1 / sum_k (p_k / X_k)        share of group k = t p_k / X_k        T = t (m + b) / m

orders the combinations of meshes; the best of them are solved and cut exactly.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.order.schedules import SCHEDULES, in_flight
from autopar.search import Infeasible, NoAssignment

from ..sharding.mesh import Mesh
from .candidates import meshes, stage_counts
from .outer import Outer
from .pipeline_parts import thrifty
from .request import Request
from .solved import Mode
from .staged import Group, Staged, staged, unfolded
from .subject import Subject
from .tables import Tables
from .tuning import TUNING
from .work import Counts, Work

UNEVEN = 64
"""Devices of one kind up to which groups of unequal size are tried."""
SMALL_STAGES = 16
"""Stages of one group, at most."""
EXACT, ALIKE = 16, 2
"""How many combinations are solved and cut; and how many of them have as many stages and micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Groups in the order of their stages, how many micro-batches they run, the step that is expected, and what it is at the `least`."""

    groups: tuple[Group, ...]
    micro_batches: int
    seconds: float
    least: float


def _nearest(counts: Sequence[int], target: int) -> int:
    """The number that is the least multiple of another, or it of them."""
    return min(counts, key=lambda count: abs(math.log(count / target)))


class Mixed:
    """The unlike pipelines of a request; `bound`: seconds that no combination that was thought of undercuts."""

    def __init__(self, subject: Subject, request: Request) -> None:
        self.subject, self.request = subject, request
        self.bound = math.inf

    def best(self, outer: Outer) -> Staged | None:
        """The best of the most promising combinations, each in the first of the modes of an outer search that fits.

        They are cut on the folded graph; the best is solved on the whole one.
        """
        found: list[tuple[float, Combination, Mode]] = []
        for combination in self._promising():
            for mode in outer.trials.modes(combination.micro_batches):
                with contextlib.suppress(Infeasible, NoAssignment):
                    found.append((self._cut(combination, mode, outer, short=True).pipeline.step, combination, mode))
                    break
        for _, combination, mode in sorted(found, key=lambda entry: entry[0]):
            with contextlib.suppress(Infeasible, NoAssignment):
                return self._cut(combination, mode, outer, short=False)
        return None

    def _promising(self) -> list[Combination]:
        """The most promising combinations of each number of stages and micro-batches: few large stages beside many small ones."""
        combinations = sorted(self.combinations(), key=lambda c: c.seconds)
        self.bound = min((c.least for c in combinations), default=math.inf)
        taken: Counter[tuple[int, int]] = Counter()
        found = []
        for combination in combinations:
            kind = sum(group.stages for group in combination.groups), combination.micro_batches
            taken[kind] += 1
            if taken[kind] <= ALIKE:
                found.append(combination)
        return found[:EXACT]

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
                yield from self._combined(order, chosen)

    def _choices(self, pool: Cluster) -> Iterator[tuple[int, Mesh, float]]:
        """Stages and mesh of a group, and the seconds of the whole model on one of these stages."""
        outer = Outer(self.subject, replace(self.request, cluster=pool))
        counts = self.subject.micro_batches(2)
        for stages in stage_counts(pool.devices, SMALL_STAGES - 1) if counts else ():
            for mesh in meshes(pool, stages, TUNING.plain_axes):
                try:
                    yield stages, mesh, outer.trials.bounds.base_seconds(pool.devices, stages, mesh, counts[0])
                except NoAssignment:
                    continue

    def _combined(self, order: Sequence[tuple[Cluster, int]], chosen: Sequence[tuple[int, Mesh, float]]) -> Iterator[Combination]:
        """The combination of these stages and meshes, with enough micro-batches to fill it, and with as few as it has stages."""
        stages = sum(count for count, _, _ in chosen)
        if self.request.stages not in (None, stages):
            return
        counts = self.subject.micro_batches(stages, self.request.micro_batches)
        if not counts:
            return
        wanted = {_nearest(counts, TUNING.filled * stages), _nearest(counts, stages)}
        rate = sum(count / seconds for count, _, seconds in chosen)
        groups = tuple(
            Group(cluster=pool, whole=self.request.cluster, start=start, stages=count, mesh=mesh, share=count / seconds / rate)
            for (pool, start), (count, mesh, seconds) in zip(order, chosen, strict=True)
        )
        for count in sorted(wanted):
            seconds = self._passes(stages, count) / count / rate
            yield Combination(groups=groups, micro_batches=count, seconds=seconds, least=1.0 / rate)

    def _passes(self, stages: int, micro_batches: int) -> float:
        """How often the time of a micro-batch counts under the schedule that keeps least in flight."""
        row = SCHEDULES[thrifty(self.request.pipeline, stages, micro_batches)]
        return micro_batches + row.bubble(stages, 0.0, 1)

    def _cut(self, combination: Combination, mode: Mode, outer: Outer, *, short: bool) -> Staged:
        """The best cuts of a combination, on the folded graph or the whole one; raises `Infeasible` and `NoAssignment`."""
        request, count = self.request, combination.micro_batches
        stages = sum(group.stages for group in combination.groups)
        analysis = self.subject.analysis(short=short, micro_batches=count)
        prices = {id(group): self.subject.prices(group.cluster, group.mesh, stages) for group in combination.groups}
        schedule = outer.trials.schedule(mode, count, list(prices.values()), short=short)
        work = Work(
            counts=self.subject.counts if short else Counts(), passes=self._passes(stages, count), accumulating=count > 1, zero=mode.zero,
            in_flight=in_flight(thrifty(request.pipeline, stages, count), 0, stages, count), segments=schedule.recompute,
        )  # fmt: skip

        def tables(group: Group) -> Tables:
            return request.offering(request.tables(analysis, prices[id(group)], work, whole=count == 1), group.stages / group.share)

        expand = self.subject.expand if short else unfolded
        return staged(combination.groups, tables, schedule, request, always=outer.trials.always, expand=expand)
