"""Bounds of the candidates of the outer search, from few solutions without a limit of memory; the tables and schedules they rest on."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import cached_property

from autopar.search import nearly, solve

from ..sharding.analysis import Analysis
from ..sharding.mesh import Mesh
from .candidates import Candidate
from .first_parameters import NONE, Early, Reading
from .folded_model import FoldedModel
from .multiplicities import Multiplicities
from .parameter_traffic import most_hidden
from .passing import NOTHING, least_passes
from .pipeline_estimate import Pipe, tables_alone, weight_share
from .pipeline_parts import schedules_for, thrifty
from .request import Request
from .tables import Known, Tables
from .tuning import TUNING

Sums = dict[tuple[int, int, Mesh, int, float], float]
Parts = OrderedDict[tuple[int, int, int, Mesh], Known]
OfParameters = dict[tuple[int, int, Mesh], Known]


def _nothing() -> tuple[Sums, Parts, OfParameters]:
    return {}, OrderedDict(), {}


class Bounds:
    """What no plan of a candidate undercuts.

    `free`: a candidate's lower bound on its tables' sum in its cheapest mode, ignoring memory, as far as it is known.
    """

    def __init__(self, folded: FoldedModel, request: Request) -> None:
        self.folded, self.request = folded, request
        self.fewest: dict[tuple[int, int, Mesh], int] = {}
        self.free: dict[Candidate, float] = {}
        # None of these depends on memory: a search of the subject within another limit finds them again.
        self.sums, self.known, self.of_parameters = folded.kept(replace(request, memory=None), _nothing)

    def bound(self, candidate: Candidate, fewer: int) -> float:
        """Seconds that no step of a candidate undercuts, from a solution of its mesh with as many micro-batches or `fewer`."""
        stages, count = candidate.stages, candidate.micro_batches
        solved = self.free.get(replace(candidate, micro_batches=fewer))
        if solved is None:
            base = self.base_seconds(candidate.cluster.devices, stages, candidate.mesh, fewer)
        else:
            base = solved * fewer / (fewer + self.pipe(stages, fewer).bubble(self.thrifty(stages, fewer)))
        waits = self.least_bubble(stages, count) / count
        return (base + waits * TUNING.slack * self._alone[0] / candidate.mesh.devices) / stages

    def least_seconds(self, devices: int) -> float:
        """Seconds that no step on so many devices undercuts, by the arithmetic alone."""
        return TUNING.slack * self._alone[0] / devices

    def least_waiting(self, candidate: Candidate) -> float:
        """The same with the least passes that the stages of a candidate wait."""
        if candidate.stages == 1:
            return self.least_seconds(candidate.devices)
        pipe = self.pipe(candidate.stages, candidate.micro_batches)
        every = self.schedules(candidate.stages, candidate.micro_batches)
        passes = min((least_passes(pipe, *schedule, NOTHING) for schedule in every), default=pipe.micro_batches)
        return passes / pipe.micro_batches * self.least_seconds(candidate.devices)

    @cached_property
    def _alone(self) -> tuple[float, float, Reading]:
        """Seconds of the whole batch on one device, without any limit, the share of them that makes gradients of weights, and when
        parameters are read."""
        tables, work = tables_alone(self.folded.analysis(short=True), self.request.cluster, self.folded.counts)
        solution = solve(tables.graph)
        return solution.cost, weight_share(tables, work), Reading(tables, solution)

    def early(self, stages: int, mesh: Mesh) -> Early:
        """The parameters whose way is surely seen: none of stages, of which the others may compute meanwhile."""
        return self._alone[2].on(mesh) if stages == 1 and self.request.train else NONE

    def base_seconds(self, devices: int, stages: int, mesh: Mesh, micro_batches: int) -> float:
        """The least that the tables of a mesh add up to for so many micro-batches, without bubble, memory limit, or parameters' way."""
        fewest = self.fewest.get((devices, stages, mesh), micro_batches)
        found = self._least_sum(devices, stages, mesh, fewest, fewest)
        self.fewest[devices, stages, mesh] = fewest
        return found

    def _least_sum(self, devices: int, stages: int, mesh: Mesh, micro_batches: int, passes: float) -> float:
        """The least that the tables of a mesh add up to for so many passes of one of so many micro-batches."""
        key = (devices, stages, mesh, micro_batches, passes)
        if key not in self.sums:
            early = self.early(stages, mesh)
            # Of stages all of what parameters send may be hidden under what the others compute.
            work = Multiplicities(counts=self.folded.counts, passes=passes, hidden=1.0, early=early.readers)
            if stages == 1:
                work = most_hidden(work, self.folded.prices(self.request.cluster.sized(devices), mesh, 1))
            tables = self.tables(self.folded.analysis(short=True, micro_batches=micro_batches), devices, stages, mesh, work)
            self.sums[key] = nearly(tables.graph, close=TUNING.bounded).lower_bound - early.before
        return self.sums[key]

    def proven(self, candidate: Candidate) -> float:
        """Seconds that no step of a candidate without stages undercuts, by a solution of its own."""
        count = candidate.micro_batches
        return self._least_sum(candidate.cluster.devices, 1, candidate.mesh, count, count)

    def tables(self, analysis: Analysis, devices: int, stages: int, mesh: Mesh, work: Multiplicities) -> Tables:
        """The tables of the whole model on the mesh of one of so many stages; parts are kept for the next ones there."""
        request = self.request
        prices = self.folded.prices(request.cluster.sized(devices), mesh, stages)
        key = (id(analysis), devices, stages, mesh)
        of_parameters = self.of_parameters.setdefault((devices, stages, mesh), Known())
        known = self.known.setdefault(key, Known(of_parameters=of_parameters))
        self.known.move_to_end(key)
        if len(self.known) > TUNING.remembered:
            self.known.popitem(last=False)
        return request.tables(analysis, prices, work, whole=analysis is self.folded.analysis(short=True), known=known)

    def thrifty(self, stages: int, micro_batches: int) -> str:
        """The pipeline schedule that keeps least in flight."""
        return thrifty(self.request.pipeline, stages, micro_batches)

    def pipe(self, stages: int, micro_batches: int) -> Pipe:
        """The pipeline of so many stages and micro-batches."""
        weight, share = self._alone[1] if stages > 1 else 0.0, self.request.cluster.core_share
        return Pipe(stages=stages, micro_batches=micro_batches, weight=weight, share=share)

    def schedules(self, stages: int, micro_batches: int) -> tuple[tuple[str, int], ...]:
        """The pipeline schedules that there are for so many stages and micro-batches."""
        request, pieces = self.request, len(self.folded.cuts)
        return tuple(schedules_for(stages, micro_batches, pieces=pieces, pipeline=request.pipeline, interleave=request.interleave))

    def least_bubble(self, stages: int, micro_batches: int) -> float:
        """The passes that stages wait under the schedule that waits least."""
        return self.pipe(stages, micro_batches).least_bubble(self.schedules(stages, micro_batches)) if stages > 1 else 0.0
