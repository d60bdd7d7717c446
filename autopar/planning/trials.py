"""A candidate of the outer search: its tables on the folded graph, its solution, and the step that this promises."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.costmodel.memory import certain_bytes
from autopar.costmodel.pricing import MeshPrices
from autopar.order.schedules import in_flight
from autopar.search import Infeasible, Interrupted, Solution, solve

from ..sharding.analysis import Analysis
from ..sharding.mesh import Mesh
from ..sharding.schedule import Schedule
from ..tables import Known, Tables
from .candidates import Candidate
from .expected import Pipe, tables_alone, weight_share
from .pipelines import schedules_for, thrifty
from .request import Request
from .solving import EXACT_METHOD, QUICK_METHOD, solve_within
from .staged import Group, staged
from .subject import Subject
from .work import Counts, Work

REMEMBERED = 4
"""Candidates of which parts of tables are kept for the next mode."""
HIDDEN = 0.9
"""Share of the reduction of gradients that candidates are ranked with as hidden under the backward pass (the rest: its slowdown)."""
SLACK = 0.9
"""What the arithmetic may be below that of one device, for operators whose shards fit the device better than the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What is recomputed, and how parameters that are stored split are used (see `Request`)."""

    zero: int
    recompute: str

    def repeats(self, other: Mode) -> bool:
        """Whether it does all that the other mode does, and more, so that it is no faster without a limit of memory."""
        return other.recompute in ("none", self.recompute) and 0 < other.zero <= self.zero


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """The priced tables of a candidate and their solution; `seconds` of the step as the tables add it up, and a bound of them.

    `free`: whether the solution is the best without a limit of memory too, so that no other mode is faster.
    """

    candidate: Candidate
    mode: Mode
    tables: Tables
    solution: Solution
    seconds: float
    bound: float
    free: bool = False


class Trials:
    """The candidates of a request, each solved when it is asked for.

    `free`: what the tables of a candidate add up to at the least, without a limit of memory, in the mode that costs least. `left`: what
    an interrupted solution had found.
    """

    def __init__(self, subject: Subject, request: Request) -> None:
        self.subject, self.request = subject, request
        self.always = certain_bytes(subject.analysis(short=False))
        self.left: Solved | None = None
        self.base: dict[tuple[int, int, Mesh], float] = {}
        self.free: dict[Candidate, float] = {}
        self.known: OrderedDict[tuple[int, int, int, Mesh], Known] = OrderedDict()
        self.binding: set[tuple[Candidate, Mode]] = set()

    # --- bounds ---

    def bound(self, candidate: Candidate, fewer: int) -> float:
        """Seconds that no step of a candidate undercuts, from a solution of its mesh with as many micro-batches or `fewer`."""
        stages, count = candidate.stages, candidate.micro_batches
        solved = self.free.get(replace(candidate, micro_batches=fewer))
        if solved is None:
            base = self.base_seconds(candidate.cluster.devices, stages, candidate.mesh, fewer)
        else:
            base = solved * fewer / (fewer + self._pipe(stages, fewer).bubble(self._thrifty(stages, fewer)))
        waits = self._pipe(stages, count).least_bubble(self.schedules(stages, count)) / count
        return (base + waits * SLACK * self._alone[0] / candidate.mesh.devices) / stages

    @cached_property
    def _alone(self) -> tuple[float, float]:
        """Seconds of the whole batch on one device, without any limit, and the share of them that makes gradients of weights."""
        tables, work = tables_alone(self.subject.analysis(short=True), self.request.cluster, self.subject.counts)
        return solve(tables.graph).cost, weight_share(tables, work)

    def base_seconds(self, devices: int, stages: int, mesh: Mesh, micro_batches: int) -> float:
        """The least that the tables of a mesh add up to for so many micro-batches, without bubble or memory limit."""
        key = (devices, stages, mesh)
        if key not in self.base:
            work = Work(counts=self.subject.counts, passes=micro_batches, hidden=_hidden(stages))
            tables = self._tables(self.subject.analysis(short=True, micro_batches=micro_batches), devices, stages, mesh, work)
            self.base[key] = solve(tables.graph).lower_bound
        return self.base[key]

    def _tables(self, analysis: Analysis, devices: int, stages: int, mesh: Mesh, work: Work) -> Tables:
        request = self.request
        prices = self.subject.prices(request.cluster.sized(devices), mesh, stages)
        key = (id(analysis), devices, stages, mesh)
        known = self.known.setdefault(key, Known())
        self.known.move_to_end(key)
        if len(self.known) > REMEMBERED:
            self.known.popitem(last=False)
        return request.tables(analysis, prices, work, whole=analysis is self.subject.analysis(short=True), known=known)

    # --- what a candidate is made of ---

    def _thrifty(self, stages: int, micro_batches: int) -> str:
        """The pipeline schedule that keeps least in flight."""
        return thrifty(self.request.pipeline, stages, micro_batches)

    def _pipe(self, stages: int, micro_batches: int) -> Pipe:
        return Pipe(stages=stages, micro_batches=micro_batches, weight=self._alone[1] if stages > 1 else 0.0)

    def schedules(self, stages: int, micro_batches: int) -> tuple[tuple[str, int], ...]:
        """The pipeline schedules that there are for so many stages and micro-batches."""
        request = self.request
        found = schedules_for(
            stages, micro_batches, pieces=len(self.subject.cuts), pipeline=request.pipeline, interleave=request.interleave
        )  # fmt: skip
        return tuple(found)

    def modes(self, micro_batches: int) -> Iterator[Mode]:
        """Recompute and ZeRO, as far as they are not fixed; what costs least time first."""
        request = self.request
        zeros = [1, 2, 3] if micro_batches > 1 else [1, 3]
        recomputes = ["none", "selective", "full"] if request.train and self.subject.runs else ["none"]
        for recompute in recomputes if request.recompute is None else [request.recompute]:
            for zero in (zeros if request.train else [1]) if request.zero is None else [request.zero]:
                yield Mode(zero=zero, recompute=recompute)

    def work(self, candidate: Candidate, mode: Mode, counts: Counts, *, short: bool) -> Work:
        """The multiplicities of a candidate, under the schedule that keeps least in flight."""
        stages, count, schedule = candidate.stages, candidate.micro_batches, self._thrifty(candidate.stages, candidate.micro_batches)
        passes = count + self._pipe(stages, count).bubble(schedule)
        return Work(
            counts=counts, passes=passes, accumulating=count > 1, zero=mode.zero, hidden=_hidden(stages),
            in_flight=in_flight(schedule, 0, stages, count), segments=self.subject.segments(mode.recompute, short=short),
        )  # fmt: skip

    def group(self, candidate: Candidate) -> Group:
        """The devices of a candidate's stages."""
        cluster = candidate.cluster
        return Group(cluster=cluster, whole=cluster, start=0, stages=candidate.stages, mesh=candidate.mesh)

    def schedule(self, mode: Mode, micro_batches: int, prices: Sequence[MeshPrices], *, short: bool) -> Schedule:
        """What the runtime is told; of the meshes of several groups the one with the largest units decides."""
        return Schedule(
            micro_batches=micro_batches,
            recompute=self.subject.segments(mode.recompute, short=short),
            gathered="again" if mode.zero == 3 else "kept",
            accumulated="shards" if mode.zero == 2 else "whole",
            unit_bytes=max(one.unit_bytes for one in prices),
            types=self.request.types,
            reductions=self.request.reductions,
        )

    def cut(self, solved: Solved) -> Solved:
        """A pipeline with the seconds of its best cuts; raises `Infeasible` where no cut fits."""
        schedule = self.schedule(solved.mode, solved.candidate.micro_batches, [solved.tables.prices], short=True)
        groups, expand = [self.group(solved.candidate)], self.subject.expand
        found = staged(groups, lambda _: solved.tables, schedule, self.request, always=self.always, expand=expand)
        return replace(solved, seconds=found.pipeline.step)

    # --- its solution ---

    def room(self, candidate: Candidate) -> float:
        """Bytes that the tables of all stages may fill together."""
        return candidate.stages * max(self.request.limit - self.always, 0.0)

    def solve(self, candidate: Candidate, mode: Mode, *, below: float = math.inf) -> Solved | None:
        """The solution of a candidate within the memory; None where, without a limit, it takes `below` seconds or more.

        Raises `Infeasible`, with no more than a bound of the memory that would do where others are known, and `NoAssignment`.
        """
        tables, room, exact = self._folded(candidate, mode), self.room(candidate), self.request.method == EXACT_METHOD
        if below < math.inf and (least := tables.least_kept()) > room:
            raise Infeasible(least, room)
        try:
            if exact or self.request.may_offload:
                free = solve(tables.graph)
                if mode == next(self.modes(candidate.micro_batches)):
                    self.free[candidate] = free.lower_bound
                fits = free.memory <= room and tables.host_of(free.choices) <= tables.host_room
                if fits and exact:
                    return self._solved(candidate, mode, tables, free, free=True)
                if exact and self._least(candidate, free.lower_bound) >= below:
                    return None
                if not fits and self.binds(candidate, mode):
                    tables = self.offering(tables, candidate, mode)
            return self._solved(candidate, mode, tables, solve_within(tables, QUICK_METHOD if exact else self.request.method, room))
        except Interrupted as interrupt:
            if interrupt.best is not None:
                self.left = self._solved(candidate, mode, tables, interrupt.best)
            raise

    def _folded(self, candidate: Candidate, mode: Mode) -> Tables:
        """The tables of a candidate, on the folded graph."""
        analysis = self.subject.analysis(short=True, micro_batches=candidate.micro_batches)
        work = self.work(candidate, mode, self.subject.counts, short=True)
        return self.offering(self._tables(analysis, candidate.cluster.devices, candidate.stages, candidate.mesh, work), candidate, mode)

    def offering(self, tables: Tables, candidate: Candidate, mode: Mode) -> Tables:
        """Tables of a candidate with the choices of host memory, if they are to have them."""
        return self.request.offering(tables, candidate.stages, binding=(candidate, mode) in self.binding)

    def binds(self, candidate: Candidate, mode: Mode) -> bool:
        """Note that the memory binds a candidate, so that it is offered host memory; whether it was not before."""
        new = (candidate, mode) not in self.binding
        self.binding.add((candidate, mode))
        return new and self.request.may_offload

    def _solved(self, candidate: Candidate, mode: Mode, tables: Tables, solution: Solution, *, free: bool = False) -> Solved:
        seconds, short, stages, count = solution.cost, False, candidate.stages, candidate.micro_batches
        if stages > 1:
            pipe, schedules = self._pipe(stages, count), self.schedules(stages, count)
            work = self.work(candidate, mode, self.subject.counts, short=True)
            expected = pipe.expected(tables, solution, work, schedules, self.room(candidate))
            seconds, short = expected.seconds * self.subject.imbalance(tables, solution, stages), expected.short
        return Solved(
            candidate=candidate, mode=mode, tables=tables, solution=solution, seconds=seconds,
            bound=self._least(candidate, solution.lower_bound), free=free and not short,
        )  # fmt: skip

    def _least(self, candidate: Candidate, bound: float) -> float:
        """What a bound of the tables' sum is for a step, under the schedule that waits least."""
        stages, count = candidate.stages, candidate.micro_batches
        pipe, schedules = self._pipe(stages, count), self.schedules(stages, count)
        return bound / stages * (count + pipe.least_bubble(schedules)) / (count + pipe.bubble(self._thrifty(stages, count)))


def _hidden(stages: int) -> float:
    """Of stages, the exposed rest of the reduction is counted when they are cut."""
    return HIDDEN if stages == 1 else 0.0
