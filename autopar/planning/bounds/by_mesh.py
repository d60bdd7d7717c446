"""Bounds of candidates from few solutions without a limit of memory, mesh by mesh.

The tables and schedules that they rest on are kept for other bounds.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.planning.model import FoldedModel, Request
from autopar.planning.model.effort import EFFORT
from autopar.planning.space import Candidate, Multiplicities
from autopar.planning.space.schedules import merging, schedules_of, thrifty
from autopar.planning.stages.estimate import Pipe
from autopar.planning.tables import Tables, requested_tables
from autopar.planning.tables.alone import longest_operator, tables_alone, weight_share
from autopar.planning.tables.parameters.first_read import NONE, Early, Reading
from autopar.planning.tables.parameters.traffic import most_hidden
from autopar.planning.tables.requested import requested_least_saved
from autopar.planning.tables.tables import Known
from autopar.search import nearly, solve
from autopar.sharding.analysis import Analysis
from autopar.sharding.mesh import Mesh

from .forced_recompute import ForcedRecompute
from .hidden_exchanges import HiddenExchanges
from .least_passes import NOTHING, least_passes

Parts = OrderedDict[tuple[Analysis, int, int, Mesh], Known]
OfMesh = dict[tuple[int, int, Mesh], Known]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The whole batch on one device: its seconds, and those of its longest operator.

    `weights`: the share that computes gradients of weights. `reading`: when parameters are read.
    """

    seconds: float
    longest: float
    weights: float
    reading: Reading


def _nothing() -> tuple[Parts, OfMesh]:
    return OrderedDict(), {}


class Bounds:
    """Seconds that no plan of a candidate undercuts.

    Solutions of tables ignore memory; the recompute that it forces is added. `hiding`: the bounds
    are of plans whose exchanges of experts may run under other computation; otherwise of those
    whose exchanges count in full.
    """

    def __init__(self, folded: FoldedModel, request: Request, *, hiding: bool = False) -> None:
        self.folded = folded
        self.request = request
        self.hiding = hiding
        self.exchanges = HiddenExchanges(folded, request)
        self.recompute = ForcedRecompute(folded, request)
        self._sums: dict[tuple[object, ...], float] = {}
        self.fewest: dict[tuple[int, int, Mesh], int] = {}
        # None of these depends on memory: a search of the subject within another limit finds them
        # again.
        self.known, self.of_mesh = folded.remembered(replace(request, memory=None), _nothing)

    def bound(self, candidate: Candidate, fewer: int, solved: float | None = None) -> float:
        """Return seconds that no step of a candidate undercuts.

        They come from a solution of its mesh with as many micro-batches, or `fewer`. `solved`: a
        lower bound on the sum of that solution's tables, if it is known.
        """
        stages = candidate.stages
        count = candidate.micro_batches
        if solved is None:
            base = self.base_seconds(candidate.cluster.devices, stages, candidate.mesh, fewer)
        else:
            base = (
                solved
                * fewer
                / (fewer + self.pipe(stages, fewer).bubble(self.thrifty(stages, fewer)))
            )
        waits = self.least_bubble(stages, count) / count
        arithmetic = EFFORT.slack * self._alone.seconds / candidate.mesh.devices
        if solved is None:
            base += self.forced(candidate)
        return (base + waits * arithmetic) / stages

    def cover(self, candidate: Candidate) -> bool:
        """Return whether a candidate may have plans of the kind that the bounds are of."""
        if self.hiding:
            return self.exchanges.possible(candidate)
        return not self.exchanges.certain(candidate)

    def carries(self, candidate: Candidate, other: Candidate) -> bool:
        """Return whether a bound of a candidate holds for more micro-batches on its mesh."""
        return not self.hiding or self.exchanges.carries(candidate, other)

    def forced(self, candidate: Candidate, schedule: tuple[str, int] | None = None) -> float:
        """Return the seconds of recompute that memory forces on a candidate (under a schedule).

        They are of one pass of each micro-batch through all stages, one after the other.
        """
        every = self.schedules(candidate.stages, candidate.micro_batches)
        schedules = every if schedule is None else (schedule,)
        return self.recompute.forced(candidate, schedules) / candidate.mesh.devices

    def least_seconds(self, devices: int) -> float:
        """Return seconds that no step on so many devices undercuts, by the arithmetic alone."""
        return EFFORT.slack * self._alone.seconds / devices

    def least_waiting(self, candidate: Candidate) -> float:
        """Return the same bound with the least passes that the stages of a candidate wait.

        A stage takes no less than the longest operator.
        """
        forced = self.forced(candidate) / candidate.stages
        if candidate.stages == 1:
            return self.least_seconds(candidate.devices) + forced
        pipe = self.pipe(candidate.stages, candidate.micro_batches)
        every = self.schedules(candidate.stages, candidate.micro_batches)
        passes = min(
            (least_passes(pipe, *schedule, NOTHING) for schedule in every),
            default=pipe.micro_batches,
        )
        least = self.least_seconds(candidate.devices) + forced
        waiting = passes / pipe.micro_batches * least
        # On shared cores a stage is faster while others wait.
        if pipe.share < 1.0:
            return waiting
        # No cut goes through an operator, so one stage has the longest one, for all micro-batches.
        longest = EFFORT.slack * self._alone.longest / candidate.mesh.devices
        return max(waiting, longest)

    @cached_property
    def _alone(self) -> Alone:
        """The whole batch on one device, without any limit."""
        return self.folded.shared(("alone", self.request.cluster), self._solved_alone)

    def _solved_alone(self) -> Alone:
        tables, work = tables_alone(
            self.folded.analysis(short=True), self.request.cluster, self.folded.counts
        )
        solution = solve(tables.graph)
        return Alone(
            seconds=solution.cost,
            longest=longest_operator(tables, work),
            weights=weight_share(tables, work),
            reading=Reading(tables, solution),
        )

    def early(self, stages: int, mesh: Mesh) -> Early:
        """Return the parameters whose collectives are certainly exposed.

        With stages there are none, as other stages may compute meanwhile.
        """
        return self._alone.reading.on(mesh) if stages == 1 and self.request.train else NONE

    def base_seconds(self, devices: int, stages: int, mesh: Mesh, micro_batches: int) -> float:
        """Return the least that the tables of a mesh add up to for so many micro-batches.

        Bubble, memory limit and the way of parameters do not count.
        """
        # Smaller micro-batches are never faster, so one solution of a mesh bounds them all.
        fewest = self.fewest.get((devices, stages, mesh), micro_batches)
        least = self._least_sum(devices, stages, mesh, fewest, fewest)
        self.fewest[devices, stages, mesh] = fewest
        return least

    def _least_sum(
        self,
        devices: int,
        stages: int,
        mesh: Mesh,
        micro_batches: int,
        passes: float,
        *,
        alone: bool = False,
    ) -> float:
        """Return the least that the tables of a mesh add up to for passes of a micro-batch.

        `alone`: see `HiddenExchanges.left_out`.
        """
        key = (devices, stages, mesh, micro_batches, passes, alone)
        if key in self._sums:
            return self._sums[key]
        early = self.early(stages, mesh)
        # Of stages all of what parameters send may be hidden under what the others compute.
        work = Multiplicities(
            counts=self.folded.counts, passes=passes, hidden=1.0, early=early.readers
        )
        if stages == 1:
            work = most_hidden(
                work, self.folded.prices(self.request.cluster.sized(devices), mesh, 1)
            )
        analysis = self.folded.analysis(short=True, micro_batches=micro_batches)
        tables = self.tables(analysis, devices, stages, mesh, work, alone=alone)
        bound = nearly(tables.graph, close=EFFORT.bounded).lower_bound
        self._sums[key] = bound - early.before
        return self._sums[key]

    def proven(self, candidate: Candidate, other: Candidate | None = None) -> float:
        """Return seconds that no step of a candidate without stages undercuts.

        `other`: the same mesh with more micro-batches, of which they are instead. What memory
        forces on it is left out, so that they hold for smaller micro-batches, too.
        """
        count = candidate.micro_batches
        place = (candidate.cluster.devices, 1, candidate.mesh, count, count)
        least = self._least_sum(*place)
        if not self.hiding or not self.exchanges.merged(candidate):
            return least
        # The share of passes that are not merged is that of one micro-batch, and the least sum is
        # concave in it.
        share = count / other.micro_batches if other is not None else 1.0
        return max(least, share * self._least_sum(*place, alone=True) + (1 - share) * least)

    def tables(
        self,
        analysis: Analysis,
        devices: int,
        stages: int,
        mesh: Mesh,
        work: Multiplicities,
        *,
        alone: bool = True,
    ) -> Tables:
        """Return the tables of the whole model on the mesh of one of so many stages.

        Their parts are kept for the next tables there. `alone`: see `HiddenExchanges.left_out`.
        """
        known = self._known(analysis, devices, stages, mesh)
        prices = self.folded.prices(self.request.cluster.sized(devices), mesh, stages)
        whole = analysis is self.folded.analysis(short=True)
        tables = requested_tables(self.request, analysis, prices, work, whole=whole, known=known)
        if not self.hiding:
            return tables
        several = stages > 1 or not whole
        return self.exchanges.left_out(
            tables, work, stages=stages, several=several, known=known, alone=alone
        )

    def least_saved(
        self, analysis: Analysis, devices: int, stages: int, mesh: Mesh, work: Multiplicities
    ) -> float:
        """Return the least bytes that operators save in such tables."""
        known = self._known(analysis, devices, stages, mesh)
        prices = self.folded.prices(self.request.cluster.sized(devices), mesh, stages)
        whole = analysis is self.folded.analysis(short=True)
        return requested_least_saved(self.request, analysis, prices, work, whole=whole, known=known)

    def _known(self, analysis: Analysis, devices: int, stages: int, mesh: Mesh) -> Known:
        """Return the parts of tables that are known of a mesh and a number of micro-batches."""
        key = (analysis, devices, stages, mesh)
        of_mesh = self.of_mesh.setdefault((devices, stages, mesh), Known())
        known = self.known.setdefault(key, Known(of_mesh=of_mesh))
        self.known.move_to_end(key)
        # Parts of tables are large; those used longest ago go first.
        if len(self.known) > EFFORT.remembered:
            self.known.popitem(last=False)
        return known

    def thrifty(self, stages: int, micro_batches: int) -> str:
        """Return the pipeline schedule that keeps least in flight."""
        return thrifty(self.request.schedule, stages, micro_batches)

    def pipe(self, stages: int, micro_batches: int) -> Pipe:
        """Return the pipeline of so many stages and micro-batches."""
        weight = self._alone.weights if stages > 1 else 0.0
        share = self.request.cluster.core_share
        return Pipe(stages=stages, micro_batches=micro_batches, weight=weight, share=share)

    def schedules(self, stages: int, micro_batches: int) -> tuple[tuple[str, int], ...]:
        """Return the pipeline schedules for so many stages and micro-batches."""
        if self.hiding:
            return merging(self.folded, self.request, stages, micro_batches)
        return schedules_of(self.folded, self.request, stages, micro_batches)

    def least_bubble(self, stages: int, micro_batches: int) -> float:
        """Return the passes that stages wait under the schedule that waits least."""
        return (
            self.pipe(stages, micro_batches).least_bubble(self.schedules(stages, micro_batches))
            if stages > 1
            else 0.0
        )
