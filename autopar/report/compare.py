"""What the search has to beat: known schemes on the same cluster, and the plan with one operator split otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster, bind_axes
from autopar.search import Infeasible, NoAssignment

from ..errors import AutoparError
from ..pins import Pins, scheme_named
from ..plan import Plan
from ..planner import Request, best_on_mesh, name_axes
from ..schemes.meanings import read_meanings
from ..sharding.analysis import Analysis
from ..sharding.mesh import Mesh
from .tables import Rival
from .words import option_words

SCHEMES = ("data", "tensor")
MAX_OPERATORS = 4000
"""Models with more operators are not compared by default: each scheme is a search of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best plan in which an operator takes `option` on `axis`: its seconds, or None where there is none, and what `option` means."""

    axis: str
    option: str
    words: str
    step: float | None


def line_mesh(cluster: Cluster) -> Mesh:
    """One axis of all devices."""
    sizes = (cluster.devices,)
    return name_axes(cluster, sizes, bind_axes(cluster, sizes) or ())


def rivals(plan: Plan, analysis: Analysis, cluster: Cluster, *, memory: float | None, schemes: Sequence[str] = SCHEMES) -> list[Rival]:
    """The known schemes on one axis of all devices, whether or not they fit the memory."""
    limit = memory if memory is not None else cluster.device.usable_memory
    mesh = line_mesh(cluster)
    free = Request(cluster=cluster, train=analysis.train, optimizer=plan.model.optimizer, memory=math.inf, mesh=mesh)
    found = []
    for name in schemes:
        figures = best_on_mesh(analysis, mesh, replace(free, limits=scheme_named(name))).estimate
        size, moved = figures.memory.total, figures.communication
        found.append(Rival(scheme=name, mesh=str(mesh), step=figures.step, communication=moved, memory=size, fits=size <= limit))
    return found


def alternatives(plan: Plan, analysis: Analysis, cluster: Cluster, operator: str, *, memory: float | None = None) -> list[Alternative]:
    """For every other option of `operator` on each axis, the best whole plan on the same mesh that takes it."""
    offer, mesh = analysis.offers[operator], plan.mesh_
    inputs = next(op.inputs for op in analysis.warm if op.name == operator)
    meanings = read_meanings(analysis)
    chosen = dict(zip((axis.name for axis in plan.mesh), plan.operators[operator].strategy, strict=True))
    request = Request(cluster=cluster, train=analysis.train, optimizer=plan.model.optimizer, memory=memory, mesh=mesh)
    found = []
    for axis in chosen:
        for option in offer.options:
            if option.name != chosen[axis]:
                words = option_words(operator, offer, option, inputs, meanings) + (", gradients as shares" if option.name == "B" else "")
                step = _step(analysis, mesh, replace(request, limits=Pins(operators={operator: {**chosen, axis: option.name}})))
                found.append(Alternative(axis=axis, option=option.name, words=words, step=step))
    return sorted(found, key=lambda a: (a.step is None, a.step or 0.0))


def _step(analysis: Analysis, mesh: Mesh, request: Request) -> float | None:
    try:
        return best_on_mesh(analysis, mesh, request).estimate.step
    except (Infeasible, NoAssignment, AutoparError):
        return None
