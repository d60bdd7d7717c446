"""Parameters whose collectives find nothing to run under: those that the first operators read.

A parameter is gathered before its first reader computes, and its gradient is whole, and can be reduced, once that reader has computed
backward. With B the computation of the operators before the reader, forward and backward,

    step >= sum of all computation + gather + reduction - B

so that where B is next to nothing all of the way of such a parameter is seen. An embedding is of this kind, and often the largest
parameter. On one axis this holds for all such parameters together, as one stream sends them. Several axes send at once, but not for one
parameter: what its gathers take adds up, and of such parameters the one with most bytes counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.costmodel import Cluster
from autopar.search import Solution, solve

from ..sharding.analysis import Analysis
from ..sharding.mesh import Mesh
from .expected import tables_alone
from .tables import Tables
from .work import Counts

SHARE = 2e-3
"""Share of a step's computation that is next to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """The first readers of parameters, by name, and the seconds that the operators before them take on one device."""

    readers: Mapping[str, str] = field(default_factory=dict)
    before: float = 0.0


NONE = Early()


class Reading:
    """When the parameters of a model are first read, by a solution of its tables on one device."""

    def __init__(self, tables: Tables, solution: Solution) -> None:
        analysis, before = tables.analysis, 0.0
        seconds = dict(_seconds(tables, solution))
        self.most = SHARE * math.fsum(seconds.values())
        self.sizes = {tensor.name: tensor.bytes for tensor in analysis.graph.parameters if tensor.name in analysis.gradients}
        self.early: dict[str, tuple[str, float]] = {}
        for op in analysis.warm:
            for name in op.inputs if before <= self.most else ():
                if name in self.sizes:
                    self.early.setdefault(name, (op.name, before))
            before += seconds.get(op.name, 0.0)

    def on(self, mesh: Mesh) -> Early:
        """The parameters whose way is surely seen on a mesh."""
        names = [name for name, (_, before) in self.early.items() if before <= self.most / mesh.devices]
        if sum(axis.size > 1 for axis in mesh.axes) > 1:
            first = [name for name in names if self.early[name][1] == 0.0]
            names = [max(first, key=lambda name: self.sizes[name])] if first else []
        before = max((self.early[name][1] for name in names), default=0.0)
        return Early(readers={name: self.early[name][0] for name in names}, before=before)


def early_on(mesh: Mesh, analysis: Analysis, cluster: Cluster, counts: Counts) -> Early:
    """The parameters of a model whose way is surely seen on a mesh."""
    tables, _ = tables_alone(analysis, cluster, counts)
    return Reading(tables, solve(tables.graph)).on(mesh)


def _seconds(tables: Tables, solution: Solution) -> Iterator[tuple[str, float]]:
    """The operators with their seconds, each for all that it stands for."""
    for variable, unary, choice in zip(tables.variables, tables.graph.unary, solution.choices, strict=True):
        if variable.what == "operator":
            yield variable.name, float(unary[choice])
