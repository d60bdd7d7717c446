"""The outer search: best first over devices, stages, meshes and micro-batches, on the graph with its equal layers folded.

With p equal stages and m micro-batches a step takes

    T = [ (m + b) X + G ] / p        X: of the whole model for one micro-batch, G: once a step; b: the bubble, in passes

The tables of a candidate hold (m + b) X + G, the memory of p devices is their limit. A bound that needs one solution for each mesh orders
the candidates (C: the least m X + G with the fewest micro-batches, A: the arithmetic alone; smaller micro-batches are never faster):

    T >= [ C + (b / m) A ] / p

Candidates are solved while their bound is below the best that is known (branch and bound: E. Lawler and D. Wood, 1966); the least bound
of those that are left bounds the result.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from autopar.costmodel.pipeline import in_flight
from autopar.costmodel.pricing import MeshPrices
from autopar.search import Infeasible, Interrupted, NoAssignment, Solution, solve

from ..errors import UsageError
from ..ir import Role
from ..sharding.analysis import Analysis
from ..sharding.mesh import Mesh
from ..tables import Known, Tables, build_tables
from .candidates import Candidate, device_counts, meshes, micro_batch_counts, stage_counts
from .request import Request
from .subject import Subject
from .work import Counts, Work

PLAIN_AXES = 2
"""Axes of the meshes on which all stages and micro-batches are tried; the best of them are split further."""
BEAM = 48
"""Meshes, of the lowest bounds, that are solved at all."""
NEAREST = 4
"""How many of the best meshes are tried with every number of micro-batches."""
FILLED = 4
"""Micro-batches for each stage with which a mesh is tried first."""
SPLIT_FURTHER, FINER = 2, 4
"""How many of the best candidates have an axis of their mesh split in two, and in how many ways together."""
CLOSE = 5e-3
"""Candidates whose bound is not better by this share are left; the bound that is reported counts them."""
REMEMBERED = 4
"""Candidates of which parts of tables are kept for the next mode."""
EXACT_METHOD, QUICK_METHOD = "dynamic_programming", "lagrangian"
"""Candidates are ranked by the quick method."""
ENOUGH = 1e-2
"""Gap up to which the quick method's solution under a memory limit is taken for the exact method's."""
HIDDEN = 0.9
"""Share of the reduction of gradients that candidates are ranked with as hidden under the backward pass (the rest: its slowdown)."""
SLACK = 0.9
"""What the arithmetic may be below that of one device, for operators whose shards fit the device better than the whole."""
WEIGHT_SHARE = 1 / 3
"""Share of a pass that makes gradients of weights, which a zero-bubble schedule moves out of the way."""

Progress = Callable[[int, int, str], None]
"""Called as (done, of, what)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What is recomputed, and how parameters that are stored split are used (see `Request`)."""

    zero: int
    recompute: str


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
    bound: float = math.inf
    misfits: list[Misfit] = field(default_factory=list)
    forbidden: int = 0
    complete: bool = True


class Outer:
    """The candidates of a request, and their solutions on the folded graph."""

    def __init__(self, subject: Subject, request: Request) -> None:
        self.subject, self.request = subject, request
        self.always = sum(t.bytes for t in subject.graph.tensors.values() if t.role in (Role.CONSTANT, Role.INPUT))
        self.ranking = Ranking()
        self.waiting: list[tuple[float, Candidate]] = []
        self.base: dict[tuple[int, int, Mesh], float] = {}
        self.known: OrderedDict[tuple[int, int, Mesh], Known] = OrderedDict()

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
        found.bound = min([found.bound, *(bound for bound, _ in self.waiting), *(s.seconds for s in found.solved[:1])])
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
        solved = self.ranking.solved
        nearest = [s.candidate for s in solved] or [group[0][1] for group in groups[:BEAM]]
        places = dict.fromkeys((c.cluster.devices, c.stages, c.mesh) for c in nearest)
        best = set(list(places)[: NEAREST if solved else BEAM])
        near = [e for e in self.waiting if (e[1].cluster.devices, e[1].stages, e[1].mesh) in best]
        for entry in sorted(near, key=lambda entry: entry[0]):
            if self._promises(*entry):
                self._try(entry)
        for candidate in list(self._split_further())[:FINER]:
            self._try((math.inf, candidate))
        if progress:
            progress(len(groups), len(groups), "done")

    def try_rest(self) -> None:
        """Solve what has no stages and was left, for memory's sake."""
        for entry in [entry for entry in self.waiting if entry[1].stages == 1]:
            self._try(entry)

    def _representative(self, group: list[tuple[float, Candidate]]) -> tuple[float, Candidate]:
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
        whole = self._arithmetic()
        for devices, stages in self._counts():
            cluster = request.cluster.sized(devices)
            for mesh in self._meshes(devices, stages):
                if self.ranking.solved and SLACK * whole / devices > self.ranking.solved[0].seconds:
                    continue
                if progress:
                    progress(0, 1, str(mesh))
                counts = [c for c in micro_batch_counts(self.subject.batch, stages) if request.micro_batches in (None, c)]
                counts = [count for count in counts if count == 1 or self.subject.divides(count)]
                try:
                    base = self.base_seconds(cluster.devices, stages, mesh, counts[0]) if counts else math.inf
                except NoAssignment:
                    self.ranking.forbidden += 1
                    continue
                group = []
                for count in counts:
                    waits = self.bubble(stages, count) / count * SLACK * whole / mesh.devices
                    candidate = Candidate(cluster=cluster, stages=stages, mesh=mesh, micro_batches=count)
                    group.append(((base + waits) / stages, candidate))
                if group:
                    yield group

    def _arithmetic(self) -> float:
        """Seconds of the whole batch on one device, without any limit."""
        analysis, counts = self.subject.analysis(short=True), self.subject.counts
        alone = MeshPrices(cluster=self.request.cluster.sized(1), mesh=Mesh(axes=()))
        tables = build_tables(analysis, alone, optimizer="none", work=Work(counts=counts))
        return solve(tables.graph).cost

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

    def bubble(self, stages: int, micro_batches: int) -> float:
        """The passes that a stage waits, under the schedule that waits least."""
        request = self.request
        if stages == 1:
            return 0.0
        found = [stages - 1.0]
        if request.pipeline in (None, "zero_bubble"):
            found.append((stages - 1) * WEIGHT_SHARE)
        if request.pipeline in (None, "interleaved") and request.interleave and micro_batches % stages == 0:
            found.append((stages - 1) / request.interleave)
        return min(found)

    def modes(self, micro_batches: int) -> Iterator[Mode]:
        """Recompute and ZeRO, as far as they are not fixed; what costs least time first."""
        request = self.request
        zeros = [1, 2, 3] if micro_batches > 1 else [1, 3]
        recomputes = ["none", "selective", "full"] if request.train and self.subject.runs else ["none"]
        for recompute in recomputes if request.recompute is None else [request.recompute]:
            for zero in (zeros if request.train else [1]) if request.zero is None else [request.zero]:
                yield Mode(zero=zero, recompute=recompute)

    def work(self, candidate: Candidate, mode: Mode, counts: Counts, *, short: bool) -> Work:
        """The multiplicities of a candidate."""
        stages, count = candidate.stages, candidate.micro_batches
        schedule = self.request.pipeline if self.request.pipeline in ("gpipe", "1f1b", "zero_bubble") else "1f1b"
        return Work(
            counts=counts, passes=count + self.bubble(stages, count), accumulating=count > 1, zero=mode.zero, hidden=_hidden(stages),
            in_flight=in_flight(schedule, 0, stages, count), segments=self.subject.segments(mode.recompute, short=short),
        )  # fmt: skip

    def _try(self, entry: tuple[float, Candidate]) -> None:
        """Solve a candidate in the modes that may be the best; stop at the first that the memory does not make slower."""
        found, candidate = self.ranking, entry[1]
        for mode in self.modes(candidate.micro_batches):
            try:
                solved = self.solve(candidate, mode)
            except Infeasible as error:
                needed = error.minimum_memory / candidate.stages
                found.misfits.append(Misfit(candidate=candidate, mode=mode, needed=needed))
                continue
            except NoAssignment:
                found.forbidden += 1
                break
            self._add(solved)
            if solved.free:
                break
        if entry in self.waiting:
            self.waiting.remove(entry)

    def _add(self, solved: Solved) -> None:
        self.ranking.solved.append(solved)
        self.ranking.bound = min(self.ranking.bound, solved.bound)
        self.ranking.solved.sort(key=lambda s: (s.seconds, s.candidate.stages, s.candidate.micro_batches, -s.candidate.devices))

    def room(self, candidate: Candidate) -> float:
        """Bytes that the tables of all stages may fill together."""
        return candidate.stages * max(self.request.limit - self.always, 0.0)

    def solve(self, candidate: Candidate, mode: Mode) -> Solved:
        """The solution of a candidate within the memory; raises `Infeasible` and `NoAssignment`."""
        analysis = self.subject.analysis(short=True, micro_batches=candidate.micro_batches)
        work = self.work(candidate, mode, self.subject.counts, short=True)
        tables = self._tables(analysis, candidate.cluster.devices, candidate.mesh, work)
        room = self.room(candidate)
        try:
            if self.request.method != EXACT_METHOD:
                return self._solved(candidate, mode, tables, solve_within(tables, self.request.method, room))
            free = solve(tables.graph)
            if free.memory <= room:
                return self._solved(candidate, mode, tables, free, free=True)
            return self._solved(candidate, mode, tables, solve_within(tables, QUICK_METHOD, room))
        except Interrupted as interrupt:
            if interrupt.best is not None:
                self._add(self._solved(candidate, mode, tables, interrupt.best))
            raise

    def _solved(self, candidate: Candidate, mode: Mode, tables: Tables, solution: Solution, *, free: bool = False) -> Solved:
        uneven = self.subject.imbalance(tables, solution, candidate.stages)
        return Solved(
            candidate=candidate, mode=mode, tables=tables, solution=solution, seconds=uneven * solution.cost / candidate.stages,
            bound=solution.lower_bound / candidate.stages, free=free,
        )  # fmt: skip

    def _split_further(self) -> Iterator[Candidate]:
        """The best candidates with one axis of their mesh split in two."""
        if self.request.mesh is not None:
            return
        seen: set[Candidate] = set()
        for solved in self.ranking.solved[:SPLIT_FURTHER]:
            candidate = solved.candidate
            shape = candidate.mesh.shape
            for mesh in meshes(candidate.cluster, candidate.stages):
                sizes = mesh.shape
                finer = replace(candidate, mesh=mesh)
                if len(sizes) == 3 and shape in ((sizes[0] * sizes[1], sizes[2]), (sizes[0], sizes[1] * sizes[2])) and finer not in seen:
                    seen.add(finer)
                    key = (candidate.cluster.devices, candidate.stages, mesh)
                    self.base.setdefault(key, 0.0)
                    yield finer


def _hidden(stages: int) -> float:
    """Of stages, the exposed rest of the reduction is counted when they are cut."""
    return HIDDEN if stages == 1 else 0.0


def solve_within(tables: Tables, method: str, limit: float) -> Solution:
    """Solve tables within a memory limit (infinite: none); the exact method where the quick one leaves too wide a gap."""
    bound = limit if limit < math.inf else None
    try:
        if method == EXACT_METHOD and bound is not None:
            quick = solve(tables.graph, method=QUICK_METHOD, memory_limit=bound)
            if quick.gap <= ENOUGH:
                return quick
        return solve(tables.graph, method=method, memory_limit=bound)
    except (Infeasible, NoAssignment):
        raise
    except ValueError as error:
        raise UsageError(f"--search {method}: {error}") from error
