"""Early parameters: the first operators read them, so no computation hides their collectives.

    step >= sum of all computation + gather + reduction - B

B is the computation of the operators before a parameter's first reader, forward and backward. The
parameter is gathered before this reader computes, and its gradient is reduced after the reader's
backward pass. If B is nearly zero, all these collectives are exposed. An embedding is of this kind,
and often the largest parameter. On a mesh of one axis this holds for all early parameters together,
because one stream carries them. Several axes communicate at the same time, but not for the same
parameter: the gathers of one parameter add up, and only the early parameter with most bytes counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.costmodel import Cluster
from autopar.planning.model.counts import Counts
from autopar.planning.tables.alone import tables_alone
from autopar.planning.tables.tables import Tables
from autopar.search import Solution, solve
from autopar.sharding.analysis import Analysis
from autopar.sharding.mesh import Mesh

SHARE = 2e-3
"""The share of a step's computation that counts as nearly zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """Early parameters with their first readers, by name.

    `before`: seconds of the operators before them, on one device.
    """

    readers: Mapping[str, str] = field(default_factory=dict)
    before: float = 0.0


NONE = Early()


class Reading:
    """The times of the parameters' first reads, by a solution of the tables on one device."""

    def __init__(self, tables: Tables, solution: Solution) -> None:
        analysis = tables.analysis
        before = 0.0
        seconds = dict(_seconds(tables, solution))
        self.most = SHARE * math.fsum(seconds.values())
        self.sizes = {
            tensor.name: tensor.bytes
            for tensor in analysis.graph.parameters
            if tensor.name in analysis.gradients
        }
        self.early: dict[str, tuple[str, float]] = {}
        # Later operators have enough before them to hide what they read.
        for op in analysis.warm:
            for name in op.inputs if before <= self.most else ():
                if name in self.sizes:
                    self.early.setdefault(name, (op.name, before))
            before += seconds.get(op.name, 0.0)

    def on(self, mesh: Mesh) -> Early:
        """The parameters whose collectives are certainly exposed on a mesh."""
        names = [
            name for name, (_, before) in self.early.items() if before <= self.most / mesh.devices
        ]
        if sum(axis.size > 1 for axis in mesh.axes) > 1:
            # Of several axes only one parameter counts; nothing at all may run before it.
            first = [name for name in names if self.early[name][1] == 0.0]
            names = [max(first, key=lambda name: self.sizes[name])] if first else []
        # What runs before the last of them is no longer exposed by the bound.
        before = max((self.early[name][1] for name in names), default=0.0)
        return Early(readers={name: self.early[name][0] for name in names}, before=before)


def early_on(mesh: Mesh, analysis: Analysis, cluster: Cluster, counts: Counts) -> Early:
    """The parameters of a model whose collectives are certainly exposed on a mesh."""
    tables, _ = tables_alone(analysis, cluster, counts)
    return Reading(tables, solve(tables.graph)).on(mesh)


def _seconds(tables: Tables, solution: Solution) -> Iterator[tuple[str, float]]:
    """The operators with their seconds, each with all the operators that it represents."""
    for variable, unary, choice in zip(
        tables.variables, tables.graph.unary, solution.choices, strict=True
    ):
        if variable.what == "operator":
            # Later members may be read after it, so that it is as early as can be.
            yield variable.members[0], float(unary[choice])
