"""The composition: a graph and a cluster become priced tables, a solver picks, and the cheapest candidate's choice is the `Plan`."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import replace

from autopar.search.elimination import sharing_orders

from ..errors import NoPlanFits, UsageError
from ..ir import Graph
from ..plan import Plan
from .alike import Mixture
from .folded_model import FoldedModel
from .joined_axes import joined_mesh
from .mixed import Mixed
from .pipeline_search import StagedProgram, interleaved
from .priced_program import PricedProgram
from .program_search import ProgramSearch
from .ranking import Progress, first_of
from .request import Request
from .walk import Walk
from .writing import as_plan


def search_plan(graph: Graph, request: Request, *, progress: Progress | None = None, folded: FoldedModel | None = None) -> Plan:
    """The cheapest plan of `graph` on the cluster; `NoPlanFits` names the smallest memory that would do.

    `folded`: what searches of the same graph have in common (see `folded_of`), where several are made.

    The outer search ranks the candidates by their tables; the programs of the cheapest are priced to the last collective.
    A cluster of several kinds of devices is searched pool by pool, and as a pipeline over all of them.
    """
    with _no_collections(), sharing_orders():
        return _search_plan(folded or folded_of(graph, request), request, progress)


def folded_of(graph: Graph, request: Request) -> FoldedModel:
    """The graph as a request searches it: with its equal layers folded, where all limits treat them alike."""
    return FoldedModel(graph, train=request.train, folded=request.limits is None or request.uniform)


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


def _search_plan(folded: FoldedModel, request: Request, progress: Progress | None) -> Plan:
    search = _Search(folded, request)
    try:
        search.run(progress)
    except KeyboardInterrupt:
        if not search.found:
            raise
    if not search.found:
        raise min(search.failures, key=lambda error: error.minimum if isinstance(error, NoPlanFits) else math.inf)
    best, mixtures = search.best()
    analysis = folded.analysis(short=False)
    return as_plan(best, request, lower_bound=search.bound, analysis=analysis, complete=search.complete, mixtures=mixtures)


class _Search:
    """The best plan of every pool, and of all of them together."""

    def __init__(self, folded: FoldedModel, request: Request) -> None:
        self.folded, self.request = folded, request
        self.found: list[PricedProgram | StagedProgram] = []
        self.failures: list[NoPlanFits | UsageError] = []
        self.finishers = [ProgramSearch(Walk(folded, replace(request, cluster=pool))) for pool in request.cluster.pools]
        self.mixed = Mixed(folded, request)
        self.complete = False

    @property
    def bound(self) -> float:
        """Seconds that no plan undercuts; 0 while a pool has not been searched.

        Pools that share the work at the best rates of each take 1 / sum_k (1 / bound_k).
        """
        bounds = [finisher.walk.ranking.bound for finisher in self.finishers]
        if len(bounds) == 1:
            return min(bounds[0], self.mixed.bound)
        rates = math.fsum(1.0 / bound for bound in bounds) if min(bounds) > 0 else 0.0
        return 1.0 / rates if rates > 0 else 0.0

    def best(self) -> tuple[PricedProgram | StagedProgram, tuple[Mixture, ...]]:
        """The best plan, its equal layers alike where that costs nothing."""
        best = first_of(self.found)
        if not self.complete:
            return best, ()
        solved = [one for finisher in self.finishers for one in finisher.walk.ranking.solved]
        return self.finishers[0].alike.best(best, solved)

    def run(self, progress: Progress | None) -> None:
        """Search pool by pool, then over all of them; interrupted, it leaves what it has found."""
        for finisher in self.finishers:
            try:
                finisher.walk.run(progress)
                self.found.append(finisher.best(progress))
            except (NoPlanFits, UsageError) as error:
                self.failures.append(error)
            if not finisher.walk.ranking.complete:
                return
        first = self.finishers[0]
        mixed = self.mixed.best(first.walk)
        self.found += [mixed] if mixed is not None else []
        best = first_of(self.found) if self.found else None
        if isinstance(best, StagedProgram):
            self.found.append(interleaved(best, self.request, always=first.solver.always))
        elif best is not None and self.request.mesh is None:
            self._join_axes(best)
        self.complete = True

    def _join_axes(self, best: PricedProgram) -> None:
        """Plan for the mesh of fewer axes on which the best program lies, if there is one: of equal plans it is the simpler."""
        if (mesh := joined_mesh(best)) is not None:
            count, cluster = best.schedule.micro_batches, best.tables.prices.cluster
            pinned = replace(self.request, cluster=cluster, mesh=mesh, stages=1, micro_batches=count)
            search = ProgramSearch(Walk(self.folded, pinned))
            search.walk.run()
            with contextlib.suppress(NoPlanFits, UsageError):
                self.found.append(search.best())
