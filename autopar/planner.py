"""The composition: a graph and a cluster become priced tables, a solver picks, and the cheapest candidate's choice is the `Plan`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.costmodel.memory import certain_bytes
from autopar.costmodel.pricing import MeshPrices
from autopar.search import Infeasible, Interrupted

from .errors import NoPlanFits, UsageError
from .ir import Graph
from .plan import Plan
from .planning.candidates import MAX_AXES, Candidate, meshes, name_axes
from .planning.found import Found, best_within, evaluate, smallest
from .planning.mixed import Mixed
from .planning.outer import HIDDEN, Mode, Outer, Progress, Solved
from .planning.request import Request
from .planning.staged import Staged, interleaved, staged
from .planning.subject import Subject
from .planning.work import Counts, Work
from .planning.writing import as_plan
from .sharding.analysis import Analysis
from .sharding.mesh import Mesh
from .sharding.schedule import Schedule
from .tables import Tables, build_tables

__all__ = [
    "MAX_AXES",
    "Found",
    "Progress",
    "Request",
    "Staged",
    "as_plan",
    "best_on_mesh",
    "evaluate",
    "meshes",
    "name_axes",
    "search_plan",
]

EVALUATED = 2
"""How many of the cheapest candidates have their programs built and priced exactly, at least."""
NEAR, CLOSE_CALLS = 1.005, 4
"""Candidates that the tables put so near the best are evaluated too, up to so many."""
FAR = 1.05
"""A candidate that the tables put so far behind the best program is not evaluated at all."""
TRIED = 8
"""How many are at most."""
SMALL_GRAPH = 500
"""Operators of a graph up to which more are tried."""


def search_plan(graph: Graph, request: Request, *, progress: Progress | None = None) -> Plan:
    """The cheapest plan of `graph` on the cluster; `NoPlanFits` names the smallest memory that would do.

    The outer search ranks the candidates by their tables; the programs of the `EVALUATED` cheapest are priced to the last collective.
    A cluster of several kinds of devices is searched pool by pool, and as a pipeline over all of them.
    """
    subject = Subject(graph, train=request.train, folded=request.limits is None or request.uniform)
    search = _Search(subject, request)
    try:
        search.run(progress)
    except KeyboardInterrupt:
        if not search.found:
            raise
    if not search.found:
        raise min(search.failures, key=lambda error: error.minimum if isinstance(error, NoPlanFits) else math.inf)
    best = min(search.found, key=lambda f: f.rank)
    return as_plan(best, request, lower_bound=search.bound, analysis=subject.analysis(short=False), complete=search.complete)


class _Search:
    """The best plan of every pool, and of all of them together."""

    def __init__(self, subject: Subject, request: Request) -> None:
        self.subject, self.request = subject, request
        self.found: list[Found | Staged] = []
        self.failures: list[NoPlanFits | UsageError] = []
        self.finishers = [_Finisher(Outer(subject, replace(request, cluster=pool))) for pool in request.cluster.pools]
        self.complete = False

    @property
    def bound(self) -> float:
        """Seconds that no plan undercuts; 0 while a pool has not been searched.

        Pools that share the work at the best rates of each take 1 / sum_k (1 / bound_k).
        """
        bounds = [finisher.outer.ranking.bound for finisher in self.finishers]
        return 1.0 / math.fsum(1.0 / bound for bound in bounds) if min(bounds) > 0 else 0.0

    def run(self, progress: Progress | None) -> None:
        """Search pool by pool, then over all of them; interrupted, it leaves what it has found."""
        for finisher in self.finishers:
            try:
                finisher.outer.run(progress)
                self.found.append(finisher.best())
            except (NoPlanFits, UsageError) as error:
                self.failures.append(error)
            if not finisher.outer.ranking.complete:
                return
        first = self.finishers[0]
        mixed = Mixed(self.subject, self.request).best(first.outer)
        self.found += [mixed] if mixed is not None else []
        best = min(self.found, key=lambda f: f.rank, default=None)
        if isinstance(best, Staged):
            self.found.append(interleaved(best, self.request, always=first.outer.always))
        self.complete = True


def _nothing(outer: Outer) -> str:
    """Why there is no candidate at all."""
    request = outer.request
    if outer.ranking.forbidden:
        where = f"on the mesh {request.mesh}" if request.mesh is not None else "on any mesh of these devices"
        return f"the pins leave no strategy for some operator {where}"
    if request.micro_batches not in (None, 1):
        return f"{request.micro_batches} micro-batches: " + (outer.subject.why_not(request.micro_batches) or "they do not fit the stages")
    if request.stages is not None:
        return f"{request.stages} stages do not divide {request.cluster.devices} devices, or are more than the layers of the model"
    return f"the mesh {request.mesh} does not have {request.cluster.devices} devices"


class _Finisher:
    """Solves ranked candidates on the whole graph and prices their programs."""

    def __init__(self, outer: Outer) -> None:
        self.outer, self.subject, self.request = outer, outer.subject, outer.request
        self.failures: list[Infeasible] = []

    @property
    def is_small(self) -> bool:
        """Whether a program is made in a fraction of a second."""
        return len(self.subject.graph.operators) <= SMALL_GRAPH

    def best(self) -> Found | Staged:
        """The best program among the solutions; where none fits the memory, the first of the thriftiest that does.

        Raises `NoPlanFits`, and `UsageError` where there is no candidate at all.
        """
        if not self.outer.ranking.solved and not self.outer.ranking.misfits:
            raise UsageError(_nothing(self.outer))
        most = TRIED if self.is_small else TRIED // 2
        found = self._finished(self._ranked()[:most])
        if not found and self.outer.ranking.complete:
            before = set(self.outer.ranking.solved)
            self.outer.try_rest()
            found = self._finished([solved for solved in self._ranked() if solved not in before][:most])
        if not found:
            found = self._thriftiest()
        if not found:
            raise self._no_plan()
        return min(found, key=lambda f: f.rank)

    def _finished(self, ranked: Sequence[Solved]) -> list[Found | Staged]:
        """The programs of the first `EVALUATED` that fit the memory, and of those behind that promise to be faster than these."""
        found: list[Found | Staged] = []
        for solved in ranked:
            near = solved.seconds < NEAR * ranked[0].seconds and len(found) < CLOSE_CALLS and self.is_small
            best = min((f.rank[0] for f in found), default=math.inf)
            enough = solved.seconds >= best and (len(found) >= EVALUATED or solved.seconds >= FAR * best)
            if not near and (enough or (len(found) > EVALUATED and not self.is_small)):
                break
            try:
                found.append(self.finish(solved))
                if solved.free and found[-1].tightened and (self.is_small or solved.candidate.stages == 1):
                    found += self._other_modes(solved, found[-1].rank[0])
            except Infeasible as error:
                self.failures += [error] if solved.candidate.stages == 1 else []
            except KeyboardInterrupt as interrupt:
                self.outer.ranking.complete = False
                found += self._interrupted(solved, interrupt)
                if not found:
                    raise
                break
        return found

    def _other_modes(self, solved: Solved, seconds: float) -> Iterator[Found | Staged]:
        """The programs of a candidate in other modes, where these promise to be faster: memory was not as free as the tables had it."""
        for mode in self.outer.modes(solved.candidate.micro_batches):
            if mode == solved.mode:
                continue
            try:
                other = self.outer.solve(solved.candidate, mode)
                if other is not None and other.seconds < seconds:
                    yield self.finish(other)
            except Infeasible:
                continue

    def _interrupted(self, solved: Solved, interrupt: KeyboardInterrupt) -> list[Found | Staged]:
        """What an interrupted search of the whole graph had found, if it fits the memory."""
        if not isinstance(interrupt, Interrupted) or interrupt.best is None or solved.candidate.stages > 1:
            return []
        schedule = self.outer.schedule(solved.mode, solved.candidate.micro_batches, short=False)
        found = evaluate(self.tables(solved.candidate, solved.mode), interrupt.best, schedule)
        return [found] if found.estimate.memory.total <= self.request.limit else []

    def _ranked(self) -> list[Solved]:
        """The solved candidates by what the tables say; first the cheapest mode of each of the `EVALUATED` best."""
        solved = self.outer.ranking.solved
        first = list({entry.candidate: entry for entry in reversed(solved)}.values())
        first = sorted(first, key=solved.index)[:EVALUATED]
        return first + [entry for entry in solved if entry not in first]

    def finish(self, solved: Solved) -> Found | Staged:
        """The exact program of a candidate, with host memory where it needs more than the tables added up to; raises `Infeasible`."""
        try:
            found = self._finish(solved)
        except Infeasible:
            if not self.outer.binds(solved.candidate, solved.mode):
                raise
            return self._finish(solved)
        if found.tightened and self.outer.binds(solved.candidate, solved.mode):
            return min(found, self._finish(solved), key=lambda f: f.rank)
        return found

    def _finish(self, solved: Solved) -> Found | Staged:
        """The program that its tables give."""
        candidate, request, outer = solved.candidate, self.request, self.outer
        schedule = outer.schedule(solved.mode, candidate.micro_batches, short=False)
        if candidate.stages > 1:
            return staged([outer.group(candidate)], lambda _: self.tables(candidate, solved.mode), schedule, request, always=outer.always)
        first = self._in_one(candidate, solved.mode, schedule, HIDDEN if request.train else 0.0)
        if first.hides_reductions:
            return first
        return min(first, self._in_one(candidate, solved.mode, schedule, 0.0), key=lambda f: f.rank)

    def _in_one(self, candidate: Candidate, mode: Mode, schedule: Schedule, hidden: float) -> Found:
        """The program without stages, if that share of the gradients' reduction ran under the backward pass.

        A step is X + max(0, G - B), G the reduction of gradients and B the compute that can hide it: the maximum over l in [0, 1] of
        X + l (G - B). The two ends of l are tried, the upper one with the slowdown of what is hidden.
        """
        request = self.request
        tables = self.tables(candidate, mode, hidden)
        room = max(request.limit - self.outer.always, 0.0)
        return best_within(tables, method=request.method, limit=request.limit, room=room, schedule=schedule)

    def tables(self, candidate: Candidate, mode: Mode, hidden: float = 0.0) -> Tables:
        """The tables of the whole graph."""
        request = self.request
        analysis = self.subject.analysis(short=False, micro_batches=candidate.micro_batches)
        work = replace(self.outer.work(candidate, mode, Counts(), short=False), hidden=hidden)
        prices = MeshPrices(cluster=candidate.cluster, mesh=candidate.mesh)
        return self.outer.offering(request.tables(analysis, prices, work, whole=candidate.micro_batches == 1), candidate, mode)

    def _thriftiest(self) -> list[Found | Staged]:
        """Of the candidates without stages that need least memory, the first whose program fits."""
        ranking = self.outer.ranking
        misfits = [(misfit.needed, misfit.candidate, misfit.mode) for misfit in ranking.misfits]
        solved = [(solved.solution.memory, solved.candidate, solved.mode) for solved in ranking.solved]
        alone = sorted((entry for entry in (*misfits, *solved) if entry[1].stages == 1), key=lambda entry: entry[0])
        # The tables misjudge each number of micro-batches in its own way: all of them have their turn.
        place: Counter[int] = Counter()
        turns: list[tuple[int, int, tuple[float, Candidate, Mode]]] = []
        for entry in alone:
            turns.append((place[entry[1].micro_batches], len(turns), entry))
            place[entry[1].micro_batches] += 1
        for _, _, (_, candidate, mode) in sorted(turns, key=lambda turn: turn[:2])[: 4 * TRIED if self.is_small else TRIED]:
            try:
                schedule = self.outer.schedule(mode, candidate.micro_batches, short=False)
                tables = self.tables(candidate, mode)
                return [smallest(tables, method=self.request.method, limit=self.request.limit, schedule=schedule)]
            except Infeasible as error:
                self.failures.append(error)
        return []

    def _no_plan(self) -> NoPlanFits:
        # What stages would need is estimated, not shown by a plan: it is named only where there is nothing else.
        staged = [misfit.needed + self.outer.always for misfit in self.outer.ranking.misfits]
        limit, held = self.request.limit, self.request.host_on(self.request.cluster)
        pinned = self.request.offload == "optimizer" and math.isfinite(held)
        hosts = f" With --offload optimizer all its state has to fit the {_size(held)} of host memory for each device." if pinned else ""
        minimum = max(min((error.minimum_memory for error in self.failures), default=min(staged, default=limit)), limit)
        return NoPlanFits(
            f"no plan fits {_size(limit)} per device on {self.request.cluster.devices} devices; the smallest that would do is "
            f"{_size(minimum)}. Give more devices or memory, a smaller --batch, or --optimizer sgd.{hosts}",
            minimum=minimum,
            limit=limit,
        )


def _size(nbytes: float) -> str:
    """Bytes rounded up to three digits, so that the size named is enough."""
    if math.isinf(nbytes):
        return "any memory"
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{math.ceil(nbytes / unit * 1000) / 1000:.3f} {name}"
    return f"{math.ceil(nbytes)} bytes"


def best_on_mesh(analysis: Analysis, mesh: Mesh, request: Request) -> Found:
    """The best program on one mesh, in one pass; raises `Infeasible` when none fits, `NoAssignment` when the limits forbid all."""
    prices = MeshPrices(cluster=request.cluster, mesh=mesh)
    limits = request.limits(analysis, mesh) if request.limits else None
    zero = 1 if request.zero is None else request.zero
    tables = build_tables(analysis, prices, optimizer=request.optimizer, limits=limits, work=Work(zero=zero))
    tables = request.offering(tables, 1, binding=False)
    room = max(request.limit - certain_bytes(analysis), 0.0)
    schedule = Schedule(gathered="again" if zero == 3 else "kept")
    return best_within(tables, method=request.method, limit=request.limit, room=room, schedule=schedule)
