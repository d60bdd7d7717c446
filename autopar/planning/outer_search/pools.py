"""The search of a cluster: each pool of like devices by itself, then pipelines over all of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.errors import NoPlanFits, UsageError
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.progress import Progress
from autopar.planning.model.request import Request
from autopar.planning.model.stops import Clock
from autopar.planning.programs.merged_passes import exchanges_rows, merged_forms
from autopar.planning.programs.priced_program import PricedProgram
from autopar.planning.programs.rank import first_of
from autopar.planning.programs.writing import Certificate
from autopar.planning.space.candidates import micro_batches_to_try
from autopar.planning.stages.staged_program import StagedProgram, with_more_in_flight

from .best_first import BestFirst
from .no_plan import no_candidate, nothing_fits
from .thriftiest import thriftiest
from .unequal_groups import UnequalGroups
from .whole_programs import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The best program, with a bound that no plan undercuts."""

    program: Program
    certificate: Certificate


class PoolSearch:
    """The search of one pool of like devices; its `programs`, the fastest first."""

    def __init__(self, folded: FoldedModel, request: Request, clock: Clock) -> None:
        self.search = BestFirst(folded, request, clock)
        self.programs: list[Program] = []

    def run(self, progress: Progress | None = None) -> None:
        """Find the programs; raises `NoPlanFits`, and `UsageError` where there is no candidate."""
        search = self.search
        search.run(progress)
        failures = search.incumbents.failures
        # Not even a candidate that is too large: pins or options forbid them all.
        if not search.incumbents and not search.misfits and not failures:
            raise no_candidate(search)
        self.programs = search.incumbents.programs
        if self.programs:
            return
        last = thriftiest(search.misfits, search.whole, failures)
        if last is None:
            raise nothing_fits(search, failures)
        self.programs = [last]


def search_pools(
    folded: FoldedModel, request: Request, progress: Progress | None = None
) -> Outcome:
    """The best program on a cluster; raises `NoPlanFits` and `UsageError`.

    Interrupted, it returns the best program so far, if there is one.
    """
    clock = Clock(request.seconds)
    pools = [
        PoolSearch(folded, replace(request, cluster=pool), clock) for pool in request.cluster.pools
    ]
    unequal = UnequalGroups(folded, request)
    programs: list[Program] = []
    failures: list[NoPlanFits | UsageError] = []
    complete = False
    try:
        complete = _search_each(pools, programs, failures, progress)
        if complete:
            programs += _over_all([pool.search for pool in pools], unequal, programs)
    except KeyboardInterrupt:
        complete = False
        if not programs:
            raise
    if not programs:
        # Of several pools, the one that is nearest to a plan tells the user most.
        raise min(failures, key=_least_memory)
    return Outcome(
        program=first_of(programs),
        certificate=Certificate(
            lower_bound=_bound(pools, unequal), held_by=_held_by(pools, unequal), complete=complete
        ),
    )


def _search_each(
    pools: list[PoolSearch],
    programs: list[Program],
    failures: list[NoPlanFits | UsageError],
    progress: Progress | None,
) -> bool:
    """Search pool by pool; whether all searches ran to their end."""
    for pool in pools:
        try:
            pool.run(progress)
            programs += pool.programs
        except (NoPlanFits, UsageError) as error:
            failures.append(error)
        if not pool.search.complete:
            return False
    return True


def _over_all(
    searches: Sequence[BestFirst], unequal: UnequalGroups, programs: list[Program]
) -> list[Program]:
    """Pipelines over unequal groups, and interleaved or merged forms of programs."""
    search = searches[0]
    more: list[Program] = []
    if (pipeline := unequal.best(search.solver)) is not None:
        more.append(pipeline)
    if not programs and not more:
        return []
    best = first_of([*programs, *more])
    if isinstance(best, StagedProgram):
        more.append(with_more_in_flight(best, search.request, always=search.solver.always))
    # Pinned on, all programs are merged already.
    if search.request.overlap_experts is None:
        if isinstance(best, PricedProgram):
            more += _in_more_micro_batches(searches, best)
        more += merged_forms([*programs, *more], search.request)
    return more


def _in_more_micro_batches(searches: Sequence[BestFirst], best: PricedProgram) -> list[Program]:
    """The best program's mesh and mode in two micro-batches or more, whose passes can be merged.

    Without merging they are slower, so that the search hardly has them. With merging a larger
    number hides more and launches more: larger ones are tried as long as that makes them faster.
    """
    folded = searches[0].folded
    request = searches[0].request
    if best.schedule.micro_batches > 1 or request.micro_batches or not exchanges_rows(best):
        return []
    several: list[Program] = []
    for count in (count for count in micro_batches_to_try(folded, 1) if count > 1):
        pinned = _in_its_mode(searches, best, count)
        search = BestFirst(folded, replace(pinned, overlap_experts=True), searches[0].clock)
        # A pin that holds for the whole batch may not hold for parts of it.
        with contextlib.suppress(NoPlanFits, UsageError):
            search.find()
        programs = search.incumbents.programs
        if several and programs and first_of(programs).seconds >= first_of(several).seconds:
            break
        several += programs
    return several


def _in_its_mode(searches: Sequence[BestFirst], best: PricedProgram, micro_batches: int) -> Request:
    """The request for plans on the mesh and in the mode of a program."""
    pinned = replace(
        searches[0].request,
        cluster=best.tables.prices.cluster,
        mesh=best.assignment.mesh,
        stages=1,
        micro_batches=micro_batches,
        gap=None,
    )
    mode = next((one for search in searches if (one := search.incumbents.mode_of(best))), None)
    # A program that was made because nothing else fitted has no mode here.
    return pinned if mode is None else replace(pinned, zero=mode.zero, recompute=mode.recompute)


def _bound(pools: list[PoolSearch], unequal: UnequalGroups) -> float:
    """Seconds that no plan undercuts; 0 while a pool has not been searched.

    Pools that share the work at the best rates of each take 1 / sum_k (1 / bound_k).
    """
    bounds = [pool.search.bound for pool in pools]
    if len(bounds) == 1:
        return min(bounds[0], unequal.bound)
    # A pool without a plan of its own may still take part in the work of all, so that nothing is
    # certain.
    if min(bounds) <= 0 or math.isinf(max(bounds)):
        return 0.0
    return 1.0 / math.fsum(1.0 / bound for bound in bounds)


def _held_by(pools: list[PoolSearch], unequal: UnequalGroups) -> str:
    """The candidate that holds the bound of a single pool."""
    if len(pools) > 1:
        return ""
    # Of unequal groups only the least bound is known, not whose it is.
    search = pools[0].search
    return search.held_by if search.bound <= unequal.bound else "stages of unequal size"


def _least_memory(error: NoPlanFits | UsageError) -> float:
    return error.minimum if isinstance(error, NoPlanFits) else math.inf
