"""The outer search: best first over devices, stages, meshes and micro-batches, on the graph with its equal layers folded.

With p equal stages and m micro-batches a step takes

    T = [ (m + b) X + G ] / p        X: of the whole model for one micro-batch, G: once a step; b: the bubble, in passes

The tables of a candidate hold (m + b) X + G, the memory of p devices is their limit. A bound that needs one solution for each mesh orders
the candidates (C: the least m X + G with the fewest micro-batches, A: the arithmetic alone; smaller micro-batches are never faster):

    T >= [ C + (b / m) A ] / p        b: of the schedule that waits least

Candidates are solved while their bound is below the best that is known (branch and bound: E. Lawler and D. Wood, 1966); the least bound
of those that are left bounds the result.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.costmodel.memory import certain_bytes
from autopar.costmodel.pipeline import in_flight
from autopar.costmodel.pricing import MeshPrices
from autopar.search import Infeasible, Interrupted, NoAssignment, Solution, solve

from ..sharding.analysis import Analysis
from ..sharding.mesh import Mesh
from ..sharding.schedule import Schedule
from ..tables import Known, Tables, build_tables
from .candidates import Candidate, device_counts, meshes, stage_counts
from .expected import Pipe, weight_share
from .pipelines import schedules_for
from .request import Request
from .solving import EXACT_METHOD, QUICK_METHOD, solve_within
from .staged import Group, staged
from .subject import Subject
from .work import Counts, Work

PLAIN_AXES = 2
"""Axes of the meshes on which all stages and micro-batches are tried; the best of them are split further."""
BEAM = 48
"""Meshes, of the lowest bounds, that are solved at all."""
NEAREST = 4
"""How many of the best meshes are tried with other numbers of micro-batches."""
RISING = 1.02
"""A mesh on which the next number of micro-batches takes so much longer than the best is left: times fall, then rise."""
FILLED = 4
"""Micro-batches for each stage with which a mesh is tried first."""
FINER = 3
"""In how many ways an axis of the best candidate's mesh is split in two."""
GAIN = 1e-3
"""Share of a step by which a finer mesh has to be faster."""
CLOSE = 5e-3
"""Candidates whose bound is not better by this share are left; the bound that is reported counts them."""
REMEMBERED = 4
"""Candidates of which parts of tables are kept for the next mode."""
HIDDEN = 0.9
"""Share of the reduction of gradients that candidates are ranked with as hidden under the backward pass (the rest: its slowdown)."""
SLACK = 0.9
"""What the arithmetic may be below that of one device, for operators whose shards fit the device better than the whole."""

Progress = Callable[[int, int, str], None]
"""Called as (done, of, what)."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A candidate of which no solution fits the memory, and the bytes that the thriftiest needs on a device."""

    candidate: Candidate
    mode: Mode
    needed: float


@dataclass(slots=True, kw_only=True)
class Ranking:
    """What the outer search found: the solved candidates, the cheapest first; a bound for all; what did not fit, and how many the pins
    forbid."""

    solved: list[Solved] = field(default_factory=list)
    bound: float = 0.0
    misfits: list[Misfit] = field(default_factory=list)
    forbidden: int = 0
    complete: bool = True


class Outer:
    """The candidates of a request, and their solutions on the folded graph."""

    def __init__(self, subject: Subject, request: Request) -> None:
        self.subject, self.request = subject, request
        self.always = certain_bytes(subject.analysis(short=False))
        self.ranking = Ranking()
        self.least = math.inf
        self.waiting: list[tuple[float, Candidate]] = []
        self.base: dict[tuple[int, int, Mesh], float] = {}
        self.known: OrderedDict[tuple[int, int, Mesh], Known] = OrderedDict()
        self.binding: set[tuple[Candidate, Mode]] = set()

    def run(self, progress: Progress | None = None) -> Ranking:
        """Solve every mesh for one number of micro-batches, the best for all numbers, and these again on finer meshes.

        Interrupted, it leaves what it has found, if anything, with a bound for all that is left.
        """
        found = self.ranking
        try:
            self._run(progress)
        except KeyboardInterrupt:
            if not found.solved:
                raise
            found.complete = False
        found.bound = min([self.least, *(bound for bound, _ in self.waiting), *(s.seconds for s in found.solved[:1])])
        return found

    def _run(self, progress: Progress | None) -> None:
        groups = sorted(self._bounded(progress), key=lambda group: min(bound for bound, _ in group))
        self.waiting = [entry for group in groups for entry in group]
        for number, group in enumerate(groups):
            if progress:
                progress(number, len(groups), str(group[0][1]))
            entry = self._representative(group)
            if number < BEAM and self._promises(min(bound for bound, _ in group), entry[1]):
                self._try(entry)
        places = list(dict.fromkeys(s.candidate.place for s in self.ranking.solved))[:NEAREST]
        for group in sorted((g for g in groups if g[0][1].place in places), key=lambda g: places.index(g[0][1].place)) or groups[:BEAM]:
            self._walk(group)
        self._split_further()
        if progress:
            progress(len(groups), len(groups), "done")

    def _walk(self, group: Sequence[tuple[float, Candidate]]) -> None:
        """Try fewer and more micro-batches than those of the representative, as long as the step gets shorter or memory is short."""
        start = group.index(self._representative(group))
        for fewer, others in ((True, group[:start][::-1]), (False, group[start + 1 :])):
            for entry in others:
                known = [s for s in self.ranking.solved if s.candidate.place == entry[1].place]
                if not self._promises(*entry):
                    continue
                self._try(entry)
                mine = [s for s in self.ranking.solved if s.candidate == entry[1]]
                rising = known and (not mine or mine[0].seconds > RISING * known[0].seconds)
                if rising and (fewer or any(s.free for s in mine)):
                    break

    def try_rest(self) -> None:
        """Solve what has no stages and was left, for memory's sake."""
        for entry in [entry for entry in self.waiting if entry[1].stages == 1]:
            self._try(entry, all_modes=True)

    def _representative(self, group: Sequence[tuple[float, Candidate]]) -> tuple[float, Candidate]:
        """The candidate of a mesh to look at first: with one micro-batch, or enough of them to fill the pipeline."""
        wanted = 1 if group[0][1].stages == 1 else FILLED * group[0][1].stages
        return min(group, key=lambda entry: (abs(math.log(entry[1].micro_batches / wanted)), entry[1].micro_batches))

    def _promises(self, bound: float, candidate: Candidate) -> bool:
        """Whether a candidate may be better than the best by more than `CLOSE`; without stages, whether it may be as near to it."""
        solved = self.ranking.solved
        return not solved or bound < (1 - CLOSE if candidate.stages > 1 else 1 + CLOSE) * solved[0].seconds

    # --- what is tried ---

    def _counts(self) -> Iterator[tuple[int, int]]:
        """Devices and stages."""
        request, cuts = self.request, len(self.subject.cuts) - 1
        if not request.train or self.subject.batch == 1:
            cuts = 0
        for devices in device_counts(request.cluster.devices) if request.fewer and request.mesh is None else (request.cluster.devices,):
            for stages in stage_counts(devices, cuts):
                if request.stages in (None, stages):
                    yield devices, stages

    def _meshes(self, devices: int, stages: int) -> tuple[Mesh, ...]:
        request = self.request
        if request.mesh is not None:
            return (request.mesh,) if request.mesh.devices * stages == devices else ()
        return meshes(request.cluster.sized(devices), stages, PLAIN_AXES)

    def _bounded(self, progress: Progress | None) -> Iterator[list[tuple[float, Candidate]]]:
        """The candidates of each mesh with their bounds, which take one solution without limit."""
        request = self.request
        for devices, stages in self._counts():
            cluster = request.cluster.sized(devices)
            for mesh in self._meshes(devices, stages):
                if progress:
                    progress(0, 1, str(mesh))
                counts = self.subject.micro_batches(stages, request.micro_batches)
                try:
                    base = self.base_seconds(cluster.devices, stages, mesh, counts[0]) if counts else math.inf
                except NoAssignment:
                    self.ranking.forbidden += 1
                    continue
                group = []
                for count in counts:
                    waits = self._pipe(stages, count).least_bubble(self._schedules(stages, count)) / count
                    candidate = Candidate(cluster=cluster, stages=stages, mesh=mesh, micro_batches=count)
                    group.append(((base + waits * SLACK * self._alone[0] / mesh.devices) / stages, candidate))
                if group:
                    yield group

    @cached_property
    def _alone(self) -> tuple[float, float]:
        """Seconds of the whole batch on one device, without any limit, and the share of them that makes gradients of weights."""
        analysis, work = self.subject.analysis(short=True), Work(counts=self.subject.counts)
        alone = MeshPrices(cluster=self.request.cluster.sized(1), mesh=Mesh(axes=()))
        tables = build_tables(analysis, alone, optimizer="none", work=work)
        return solve(tables.graph).cost, weight_share(tables, work)

    def base_seconds(self, devices: int, stages: int, mesh: Mesh, micro_batches: int) -> float:
        """The least that the tables of a mesh add up to for so many micro-batches, without bubble or memory limit."""
        key = (devices, stages, mesh)
        if key not in self.base:
            work = Work(counts=self.subject.counts, passes=micro_batches, hidden=_hidden(stages))
            tables = self._tables(self.subject.analysis(short=True, micro_batches=micro_batches), devices, mesh, work)
            self.base[key] = solve(tables.graph).lower_bound
        return self.base[key]

    def _tables(self, analysis: Analysis, devices: int, mesh: Mesh, work: Work) -> Tables:
        request = self.request
        prices = MeshPrices(cluster=request.cluster.sized(devices), mesh=mesh)
        key = (id(analysis), devices, mesh)
        known = self.known.setdefault(key, Known())
        self.known.move_to_end(key)
        if len(self.known) > REMEMBERED:
            self.known.popitem(last=False)
        return request.tables(analysis, prices, work, whole=analysis is self.subject.analysis(short=True), known=known)

    # --- a candidate ---

    @property
    def _thrifty(self) -> str:
        """The pipeline schedule that keeps least in flight."""
        return self.request.pipeline if self.request.pipeline not in (None, "interleaved") else "1f1b"

    def _pipe(self, stages: int, micro_batches: int) -> Pipe:
        return Pipe(stages=stages, micro_batches=micro_batches, weight=self._alone[1] if stages > 1 else 0.0)

    def _schedules(self, stages: int, micro_batches: int) -> tuple[tuple[str, int], ...]:
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
        stages, count, schedule = candidate.stages, candidate.micro_batches, self._thrifty
        passes = count + self._pipe(stages, count).bubble(schedule)
        return Work(
            counts=counts, passes=passes, accumulating=count > 1, zero=mode.zero, hidden=_hidden(stages),
            in_flight=in_flight(schedule, 0, stages, count), segments=self.subject.segments(mode.recompute, short=short),
        )  # fmt: skip

    def _try(self, entry: tuple[float, Candidate], *, all_modes: bool = False) -> None:
        """Solve a candidate in the modes that may be the best; stop at the first that the memory does not make slower.

        Modes whose time without a limit is above the best that is known are left out, unless `all_modes` are wanted.
        """
        found, candidate = self.ranking, entry[1]
        left: list[Mode] = []
        for mode in self.modes(candidate.micro_batches):
            if any(mode.repeats(other) for other in left):
                continue
            below = (1 + CLOSE) * found.solved[0].seconds if found.solved and not all_modes else math.inf
            try:
                solved = self.solve(candidate, mode, below=below)
            except Infeasible as error:
                needed = error.minimum_memory / candidate.stages
                found.misfits.append(Misfit(candidate=candidate, mode=mode, needed=needed))
                continue
            except NoAssignment:
                found.forbidden += 1
                break
            if solved is None:
                left.append(mode)
                continue
            cut = self._cut(solved)
            if cut is not None:
                self._add(cut)
            if solved.free:
                break
        if entry in self.waiting:
            self.waiting.remove(entry)
        if left:
            self.waiting.append((found.solved[0].seconds, candidate))

    def _cut(self, solved: Solved) -> Solved | None:
        """A pipeline that is expected to be the best, with the seconds of its best cuts; None where no cut fits."""
        candidate, best = solved.candidate, self.ranking.solved[:1]
        if candidate.stages == 1 or (best and solved.seconds >= best[0].seconds):
            return solved
        schedule, groups = self.schedule(solved.mode, candidate.micro_batches, short=True), [self.group(candidate)]
        try:
            found = staged(groups, lambda _: solved.tables, schedule, self.request, always=self.always, expand=self.subject.expand)
        except Infeasible as error:
            self.ranking.misfits.append(Misfit(candidate=candidate, mode=solved.mode, needed=error.minimum_memory))
            return None
        return replace(solved, seconds=found.pipeline.step)

    def group(self, candidate: Candidate) -> Group:
        """The devices of a candidate's stages."""
        cluster = candidate.cluster
        return Group(cluster=cluster, whole=cluster, start=0, stages=candidate.stages, mesh=candidate.mesh)

    def schedule(self, mode: Mode, micro_batches: int, *, short: bool) -> Schedule:
        """What the runtime is told."""
        return Schedule(
            micro_batches=micro_batches,
            recompute=self.subject.segments(mode.recompute, short=short),
            gathered="again" if mode.zero == 3 else "kept",
            accumulated="shards" if mode.zero == 2 else "whole",
        )

    def _add(self, solved: Solved) -> None:
        self.ranking.solved.append(solved)
        self.least = min(self.least, solved.bound)
        self.ranking.solved.sort(key=lambda s: (s.seconds, s.candidate.stages, s.candidate.micro_batches, -s.candidate.devices))

    def room(self, candidate: Candidate) -> float:
        """Bytes that the tables of all stages may fill together."""
        return candidate.stages * max(self.request.limit - self.always, 0.0)

    def solve(self, candidate: Candidate, mode: Mode, *, below: float = math.inf) -> Solved | None:
        """The solution of a candidate within the memory; None where, without a limit, it takes `below` seconds or more.

        Raises `Infeasible` and `NoAssignment`.
        """
        tables, room, exact = self._folded(candidate, mode), self.room(candidate), self.request.method == EXACT_METHOD
        try:
            if exact or self.request.may_offload:
                free = solve(tables.graph)
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
                self._add(self._solved(candidate, mode, tables, interrupt.best))
            raise

    def _folded(self, candidate: Candidate, mode: Mode) -> Tables:
        """The tables of a candidate, on the folded graph."""
        analysis = self.subject.analysis(short=True, micro_batches=candidate.micro_batches)
        work = self.work(candidate, mode, self.subject.counts, short=True)
        return self.offering(self._tables(analysis, candidate.cluster.devices, candidate.mesh, work), candidate, mode)

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
            pipe, schedules = self._pipe(stages, count), self._schedules(stages, count)
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
        pipe, schedules = self._pipe(stages, count), self._schedules(stages, count)
        return bound / stages * (count + pipe.least_bubble(schedules)) / (count + pipe.bubble(self._thrifty))

    def _split_further(self) -> None:
        """Split one axis of the best candidate's mesh in two; of the finer meshes the fastest counts, where it is faster than this one."""
        if self.request.mesh is not None or not self.ranking.solved:
            return
        best = self.ranking.solved[0]
        found = []
        for mesh in [mesh for mesh in meshes(best.candidate.cluster, best.candidate.stages) if _splits(best.candidate.mesh, mesh)][:FINER]:
            with contextlib.suppress(Infeasible, NoAssignment):
                found.append(self.solve(replace(best.candidate, mesh=mesh), best.mode, below=best.seconds))
        fastest = min((solved for solved in found if solved is not None), key=lambda s: s.seconds, default=best)
        cut = self._cut(fastest) if fastest.seconds < (1 - GAIN) * best.seconds else None
        if cut is not None and cut.seconds < (1 - GAIN) * best.seconds:
            self._add(cut)


def _splits(mesh: Mesh, finer: Mesh) -> bool:
    """Whether a mesh is another with one of its two axes split in two."""
    sizes = finer.shape
    return len(sizes) == 3 and mesh.shape in ((sizes[0] * sizes[1], sizes[2]), (sizes[0], sizes[1] * sizes[2]))


def _hidden(stages: int) -> float:
    """Of stages, the exposed rest of the reduction is counted when they are cut."""
    return HIDDEN if stages == 1 else 0.0
