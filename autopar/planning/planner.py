"""The composition: a graph and a cluster become priced tables, a solver picks, and the cheapest candidate's choice is the `Plan`."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import replace

from ..errors import NoPlanFits, UsageError
from ..ir import Graph
from ..plan import Plan
from .alike import Mixture
from .finishing import Finisher
from .found import Found
from .mixed import Mixed
from .outer import Outer
from .ranking import Progress, first_of
from .request import Request
from .staged import Staged, interleaved
from .subject import Subject
from .writing import as_plan


def search_plan(graph: Graph, request: Request, *, progress: Progress | None = None, subject: Subject | None = None) -> Plan:
    """The cheapest plan of `graph` on the cluster; `NoPlanFits` names the smallest memory that would do.

    `subject`: what searches of the same graph have in common (see `subject_of`), where several are made.

    The outer search ranks the candidates by their tables; the programs of the cheapest are priced to the last collective.
    A cluster of several kinds of devices is searched pool by pool, and as a pipeline over all of them.
    """
    with _no_collections():
        return _search_plan(subject or subject_of(graph, request), request, progress)


def subject_of(graph: Graph, request: Request) -> Subject:
    """The graph as a request searches it: with its equal layers folded, where all limits treat them alike."""
    return Subject(graph, train=request.train, folded=request.limits is None or request.uniform)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Without looking for reference cycles, of which tables have none: that would take a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _search_plan(subject: Subject, request: Request, progress: Progress | None) -> Plan:
    search = _Search(subject, request)
    try:
        search.run(progress)
    except KeyboardInterrupt:
        if not search.found:
            raise
    if not search.found:
        raise min(search.failures, key=lambda error: error.minimum if isinstance(error, NoPlanFits) else math.inf)
    best, mixtures = search.best()
    analysis = subject.analysis(short=False)
    return as_plan(best, request, lower_bound=search.bound, analysis=analysis, complete=search.complete, mixtures=mixtures)


class _Search:
    """The best plan of every pool, and of all of them together."""

    def __init__(self, subject: Subject, request: Request) -> None:
        self.subject, self.request = subject, request
        self.found: list[Found | Staged] = []
        self.failures: list[NoPlanFits | UsageError] = []
        self.finishers = [Finisher(Outer(subject, replace(request, cluster=pool))) for pool in request.cluster.pools]
        self.mixed = Mixed(subject, request)
        self.complete = False

    @property
    def bound(self) -> float:
        """Seconds that no plan undercuts; 0 while a pool has not been searched.

        Pools that share the work at the best rates of each take 1 / sum_k (1 / bound_k).
        """
        bounds = [finisher.outer.ranking.bound for finisher in self.finishers]
        if len(bounds) == 1:
            return min(bounds[0], self.mixed.bound)
        rates = math.fsum(1.0 / bound for bound in bounds) if min(bounds) > 0 else 0.0
        return 1.0 / rates if rates > 0 else 0.0

    def best(self) -> tuple[Found | Staged, tuple[Mixture, ...]]:
        """The best plan, its equal layers alike where that costs nothing."""
        best = first_of(self.found)
        if not self.complete:
            return best, ()
        solved = [one for finisher in self.finishers for one in finisher.outer.ranking.solved]
        return self.finishers[0].alike.best(best, solved)

    def run(self, progress: Progress | None) -> None:
        """Search pool by pool, then over all of them; interrupted, it leaves what it has found."""
        for finisher in self.finishers:
            try:
                finisher.outer.run(progress)
                self.found.append(finisher.best(progress))
            except (NoPlanFits, UsageError) as error:
                self.failures.append(error)
            if not finisher.outer.ranking.complete:
                return
        first = self.finishers[0]
        mixed = self.mixed.best(first.outer)
        self.found += [mixed] if mixed is not None else []
        best = first_of(self.found) if self.found else None
        if isinstance(best, Staged):
            self.found.append(interleaved(best, self.request, always=first.trials.always))
        self.complete = True
