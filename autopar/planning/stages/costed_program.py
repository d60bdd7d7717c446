"""A program of one micro-batch with all that the costs of its operators depend on."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.ir import Graph
from autopar.order.value_flow import with_casts
from autopar.sharding.analysis import Analysis
from autopar.sharding.program import Program
from autopar.sharding.schedule import Schedule, Types


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedProgram:
    """A program on a mesh, under a schedule.

    `program`: with the casts of the schedule's types. `places`: the number of each operator in the
    order of the model. `first`: the number of the operator that first reads a tensor.
    """

    program: Program
    analysis: Analysis
    prices: MeshPrices
    optimizer: str
    schedule: Schedule
    places: dict[str, int]
    first: dict[str, int]

    @classmethod
    def of(
        cls,
        program: Program,
        analysis: Analysis,
        prices: MeshPrices,
        optimizer: str,
        schedule: Schedule,
    ) -> CostedProgram:
        """Return a program with its casts, and with its operators numbered."""
        first = {
            name: readers[0][0]
            for name, readers in analysis.readers.items()
            if readers[0][0] >= 0  # a negative reader is the model's output
        }
        return cls(
            program=with_casts(program, schedule.types),
            analysis=analysis,
            prices=prices,
            optimizer=optimizer,
            schedule=schedule,
            places={op.name: index for index, op in enumerate(program.graph.operators)},
            first=first,
        )

    @property
    def graph(self) -> Graph:
        """The graph of the model's micro-batch."""
        return self.program.graph

    @property
    def mesh(self) -> tuple[int, ...]:
        """Sizes of the mesh's axes."""
        return self.prices.mesh.shape

    @property
    def types(self) -> Types:
        """The types in which values are stored, used and reduced."""
        return self.schedule.types
