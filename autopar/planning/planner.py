"""The composition: a graph and a cluster become a plan."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.errors import NoPlanFits, UsageError
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.search import sharing_orders

from .model.folded_model import FoldedModel
from .model.progress import Progress
from .model.request import Request
from .model.stops import Clock
from .outer_search import search_pools
from .programs.writing import as_plan


def search_plan(
    graph: Graph,
    request: Request,
    *,
    progress: Progress | None = None,
    folded: FoldedModel | None = None,
) -> Plan:
    """The cheapest plan of `graph` on the cluster; `NoPlanFits` names the memory that would do.

    `folded`: what searches of the same graph have in common (see `folded_of`), where several are
    made. A cluster of several kinds of devices is searched pool by pool, and as a pipeline over all
    of them.
    """
    folded = folded or folded_of(graph, request)
    request = replace(request, blocks=folded.blocks)
    with _no_collections(), sharing_orders():
        outcome = search_pools(folded, request, progress)
        return as_plan(
            outcome.program,
            request,
            certificate=outcome.certificate,
            analysis=folded.analysis(short=False),
        )


def fastest_plan(requests: Sequence[Request], search: Callable[[Request], Plan]) -> Plan:
    """The cheapest plan of several requests, which are parts of one space; its bound is of all.

    `search`: gives the plan of a request, as `search_plan` does. All of them share the seconds of
    the first request.
    """
    clock = Clock(requests[0].seconds)
    plans: list[Plan] = []
    failures: list[NoPlanFits | UsageError] = []
    for request in requests:
        # What is left of the time is for all requests to come.
        within = request if clock.left is None else replace(request, seconds=max(clock.left, 1e-9))
        try:
            plans.append(search(within))
        except (NoPlanFits, UsageError) as error:
            failures.append(error)
            continue
        if not plans[-1].provenance.complete:
            break
    if not plans:
        raise next((error for error in failures if isinstance(error, NoPlanFits)), failures[0])
    best = min(plans, key=lambda plan: plan.predicted.step)
    holder = min(plans, key=lambda plan: plan.provenance.lower_bound)
    bound = holder.provenance.lower_bound
    # Nothing is known of the requests behind one that was interrupted.
    if len(plans) + len(failures) < len(requests):
        bound = 0.0
    gap = best.predicted.step / bound - 1 if bound > 0 else None
    complete = plans[-1].provenance.complete
    origin = best.provenance.model_copy(
        update={
            "lower_bound": bound,
            "bound_of": holder.provenance.bound_of if bound > 0 else "",
            "gap": gap,
            "complete": complete,
            "asked_seconds": requests[0].seconds,
        }
    )
    return best.model_copy(update={"provenance": origin})


def folded_of(graph: Graph, request: Request) -> FoldedModel:
    """The graph with its equal layers folded, where all of the request's pins treat them alike."""
    return FoldedModel(graph, train=request.train, folded=request.folds)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Search without looking for reference cycles: tables have none, and it takes a fifth of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
