"""Pipelines of unlike stages: on several kinds of devices, or on groups of unequal size.

    t = 1 / sum_k (p_k / X_k)        share of group k = t p_k / X_k        T = t (m + b) / m

X_k: seconds of the whole model on one stage of group k. p_k: stages of group k. The shares let all
stages finish together. T, the step with m micro-batches and a bubble of b, orders the combinations
of meshes; the best of them are solved and cut exactly.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.order.schedules import SCHEDULES, in_flight
from autopar.planning.bounds import Bounds
from autopar.planning.model.counts import Counts
from autopar.planning.model.effort import EFFORT
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.space.candidates import meshes, micro_batches_to_try, stage_counts
from autopar.planning.space.modes import Mode
from autopar.planning.space.multiplicities import Multiplicities
from autopar.planning.space.schedules import thrifty
from autopar.planning.stages.parts import Group, Terms, unfolded
from autopar.planning.stages.staged_program import StagedProgram, best_pipeline
from autopar.planning.stages.whole_model import expand
from autopar.planning.tables.requested import requested_tables, with_host_choices
from autopar.search import Infeasible, NoAssignment
from autopar.sharding.mesh import Mesh

from .candidate_solver import CandidateSolver

UNEVEN = 64
"""The most devices of one kind for which groups of unequal size are tried."""
SMALL_STAGES = 16
"""The most stages of one group."""
EXACT = 16
ALIKE = 2
"""The most combinations to solve and cut, and the most of them with equal numbers of stages and
micro-batches.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Groups in the order of their stages, and their micro-batches.

    `seconds`: the expected step. `least`: its lower bound, without a bubble.
    """

    groups: tuple[Group, ...]
    micro_batches: int
    seconds: float
    least: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Stages of a group on their mesh.

    `seconds`: of the whole model on one such stage; `least`: the same, less all that may hide.
    """

    stages: int
    mesh: Mesh
    seconds: float
    least: float


Tried = tuple[float, Combination, Mode]
"""Seconds of a step of a combination, and the mode that it is solved in."""


def _seconds(tried: Tried) -> float:
    return tried[0]


def _nearest(counts: Sequence[int], target: int) -> int:
    """The number of `counts` with the ratio to `target` nearest to 1."""
    return min(counts, key=lambda count: abs(math.log(count / target)))


class UnequalGroups:
    """The pipelines of unlike stages for a request.

    `bound`: the least `least` of all combinations.
    """

    def __init__(self, folded: FoldedModel, request: Request) -> None:
        self.folded = folded
        self.request = request
        self.bound = math.inf

    def best(self, solver: CandidateSolver) -> StagedProgram | None:
        """The best pipeline of the most promising combinations, or None.

        Each combination is cut on the folded graph. The best one is solved again on the whole
        graph.
        """
        cut = [one for combination in self._promising() for one in self._tried(combination, solver)]
        if cut:
            cut += self._in_other_micro_batches(min(cut, key=_seconds), solver)
        # The folded graph decides the order; on the whole one the first that fits is taken.
        for _, combination, mode in sorted(cut, key=_seconds):
            with contextlib.suppress(Infeasible, NoAssignment):
                return self._cut(combination, mode, solver, short=False)
        return None

    def _tried(self, combination: Combination, solver: CandidateSolver) -> Iterator[Tried]:
        """The step of a combination in the outer search's first mode that fits, if one does."""
        for mode in solver.modes():
            with contextlib.suppress(Infeasible, NoAssignment):
                staged = self._cut(combination, mode, solver, short=True)
                yield staged.pipeline.step, combination, mode
                return

    def _in_other_micro_batches(self, best: Tried, solver: CandidateSolver) -> Iterator[Tried]:
        """The best combination in more micro-batches, and in fewer, as long as each is faster."""
        combination = best[1]
        stages = sum(group.stages for group in combination.groups)
        counts = micro_batches_to_try(self.folded, stages, self.request.micro_batches, every=True)
        own = combination.micro_batches
        more = [count for count in counts if count > own]
        fewer = [count for count in reversed(counts) if 1 < count < own]
        for ahead in (more, fewer):
            last = best
            for count in ahead:
                tried = list(self._tried(replace(combination, micro_batches=count), solver))
                if not tried or tried[0][0] >= last[0]:
                    break
                last = tried[0]
                yield last

    def _promising(self) -> list[Combination]:
        """The most promising combinations; at most `ALIKE` with equal numbers of stages and
        micro-batches.

        So a few large stages are tried as well as many small ones.
        """
        combinations = sorted(self.combinations(), key=lambda c: c.seconds)
        self.bound = min((c.least for c in combinations), default=math.inf)
        taken: Counter[tuple[int, int]] = Counter()
        promising = []
        for combination in combinations:
            kind = sum(group.stages for group in combination.groups), combination.micro_batches
            taken[kind] += 1
            if taken[kind] <= ALIKE:
                promising.append(combination)
        return promising[:EXACT]

    def pools(self) -> Iterator[tuple[tuple[Cluster, int], ...]]:
        """The groups of devices, each with the number of its first device, in every order of stages
        to try.
        """
        cluster = self.request.cluster
        if cluster.joined:
            parts = tuple(zip(cluster.pools, cluster.starts, strict=True))
            # Orders grow as the factorial of the kinds; of many, one order and its reverse are
            # tried.
            yield from itertools.permutations(parts) if len(parts) <= 3 else (parts, parts[::-1])
            return
        # Devices of one kind: the largest power of two makes one group, the rest the other.
        power = 1 << (cluster.devices.bit_length() - 1)
        if 2 < cluster.devices <= UNEVEN and power < cluster.devices:
            rest = cluster.devices - power
            large = (cluster.part(0, power), 0)
            small = (cluster.part(power, rest), power)
            yield large, small
            yield small, large

    def combinations(self) -> Iterator[Combination]:
        """Every combination of stages and meshes of the groups; no target says unlike stages."""
        if (
            self.request.mesh is not None
            or self.request.space is not None
            or self.request.micro_batches == 1
            or self.folded.batch == 1
        ):
            return
        # The same group comes back in several orders of stages.
        known: dict[Cluster, list[Choice]] = {}
        for order in self.pools():
            for pool, _ in order:
                if pool not in known:
                    known[pool] = list(self._choices(pool))
            for chosen in itertools.product(*(known[pool] for pool, _ in order)):
                yield from self._combined(order, chosen)

    def _choices(self, pool: Cluster) -> Iterator[Choice]:
        """The numbers of stages and meshes of a group."""
        request = replace(self.request, cluster=pool)
        bounds = Bounds(self.folded, request)
        # There are at least two groups, so that a pipeline has at least two stages.
        counts = micro_batches_to_try(self.folded, 2)
        for stages in stage_counts(pool.devices, SMALL_STAGES - 1) if counts else ():
            for mesh in meshes(pool, stages, EFFORT.plain_axes):
                with contextlib.suppress(NoAssignment):
                    seconds = bounds.base_seconds(pool.devices, stages, mesh, counts[0])
                    # Stages may hide exchanges of experts, so that only the arithmetic is certain.
                    certain = bounds.least_seconds(mesh.devices)
                    least = certain if bounds.exchanges.exist else seconds
                    yield Choice(stages=stages, mesh=mesh, seconds=seconds, least=least)

    def _combined(
        self, order: Sequence[tuple[Cluster, int]], chosen: Sequence[Choice]
    ) -> Iterator[Combination]:
        """The combination of these stages and meshes, with micro-batches that fill it, and with as
        many as stages.
        """
        stages = sum(one.stages for one in chosen)
        if self.request.stages not in (None, stages):
            return
        counts = micro_batches_to_try(self.folded, stages, self.request.micro_batches)
        if not counts:
            return
        wanted = {_nearest(counts, EFFORT.filled * stages), _nearest(counts, stages)}
        # This is 1 / t of the formula above.
        rate = sum(one.stages / one.seconds for one in chosen)
        least = 1.0 / sum(one.stages / one.least for one in chosen)
        groups = tuple(
            Group(
                cluster=pool,
                whole=self.request.cluster,
                start=start,
                stages=one.stages,
                mesh=one.mesh,
                share=one.stages / one.seconds / rate,
            )
            for (pool, start), one in zip(order, chosen, strict=True)
        )
        for count in sorted(wanted):
            seconds = self._passes(stages, count) / count / rate
            yield Combination(groups=groups, micro_batches=count, seconds=seconds, least=least)

    def _passes(self, stages: int, micro_batches: int) -> float:
        """The micro-batches plus the bubble, in passes, of the schedule with fewest micro-batches
        in flight.
        """
        row = SCHEDULES[thrifty(self.request.schedule, stages, micro_batches)]
        return micro_batches + row.bubble(stages, 0.0, 1)

    def _cut(
        self, combination: Combination, mode: Mode, solver: CandidateSolver, *, short: bool
    ) -> StagedProgram:
        """The best cuts of a combination, on the folded graph (`short`) or the whole one.

        Raises `Infeasible` or `NoAssignment`.
        """
        request = self.request
        count = combination.micro_batches
        stages = sum(group.stages for group in combination.groups)
        analysis = self.folded.analysis(short=short, micro_batches=count)
        prices = {
            group: self.folded.prices(group.cluster, group.mesh, stages)
            for group in combination.groups
        }
        schedule = solver.schedule(mode, count, list(prices.values()), short=short)
        work = Multiplicities(
            counts=self.folded.counts if short else Counts(),
            passes=self._passes(stages, count),
            accumulating=count > 1,
            zero=mode.zero,
            in_flight=in_flight(thrifty(request.schedule, stages, count), 0, stages, count),
            segments=schedule.recompute,
        )

        tables = [
            with_host_choices(
                request,
                requested_tables(request, analysis, prices[group], work, whole=count == 1),
                # As many stages as the model would have if all were like those of this group.
                group.stages / group.share,
            )
            for group in combination.groups
        ]
        terms = Terms(
            request=request,
            schedule=schedule,
            always=solver.always,
            expand=functools.partial(expand, self.folded) if short else unfolded,
        )
        return best_pipeline(combination.groups, tables, terms)
