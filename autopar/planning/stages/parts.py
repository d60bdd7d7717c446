"""The parts of a pipeline: groups of equal stages, each with a solution of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.costmodel import Cluster
from autopar.order.schedules import SCHEDULES
from autopar.planning.model import Request
from autopar.planning.space.schedules import schedules_for, without_merged
from autopar.planning.tables import Tables, decode
from autopar.search import Solution
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Assignment, Program
from autopar.sharding.program_builder import build_program
from autopar.sharding.schedule import Schedule

from .cutter import Cutter
from .operator_costs import OperatorCosts, operator_costs
from .piece_costs import PieceCosts
from .stage import Place

Expand = Callable[[OperatorCosts], OperatorCosts]
"""Makes the costs of the model's operators from those of the graph that was solved."""


def unfolded(costs: OperatorCosts) -> OperatorCosts:
    """Return the costs as they are, where the graph that was solved is the model itself."""
    return costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal stages on one kind of device, each on a `mesh`.

    `cluster`: exactly the devices of these stages. `whole`: the cluster of all groups, through
    which stages reach those of other groups. `start`: the number of the group's first device in it.
    `share`: the share of the model's work that the group is to take.
    """

    cluster: Cluster
    whole: Cluster
    start: int
    stages: int
    mesh: Mesh
    share: float = 1.0

    def places(self) -> Iterator[Place]:
        """Yield the devices of each stage."""
        count = self.mesh.devices
        for stage in range(self.stages):
            yield Place(cluster=self.whole, start=self.start + stage * count, count=count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A group with a solution of the whole model, as if one of its stages held all of it."""

    group: Group
    tables: Tables
    solution: Solution
    assignment: Assignment
    program: Program
    figures: OperatorCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms on which all pipelines of a candidate are made.

    `schedule`: of the passes inside a stage. `always`: bytes of each device that inputs and
    constants take.
    """

    request: Request
    schedule: Schedule
    always: float
    expand: Expand = unfolded

    def part(self, group: Group, tables: Tables, solution: Solution) -> Part:
        """Return a group with a solution of its tables, its program, and its operators' costs."""
        # Costs are of the program that the solution decides, with the chains that it takes.
        assignment = decode(tables, solution.choices)
        program = build_program(tables.analysis.graph, assignment)
        costs = operator_costs(
            program,
            tables.analysis,
            tables.prices,
            optimizer=tables.optimizer,
            schedule=self.schedule,
            merges=any(SCHEDULES[name].merges for name in self.request.schedules),
        )
        return Part(
            group=group,
            tables=tables,
            solution=solution,
            assignment=assignment,
            program=program,
            figures=self.expand(costs),
        )

    def room(self, group: Group) -> float:
        """Return the bytes of a device of a group, without those that are always taken."""
        return max(self.request.memory_limit_on(group.cluster) - self.always, 0.0)

    def cutter(self, parts: Sequence[Part]) -> tuple[Cutter, list[tuple[str, int]]]:
        """Return a cutter of the model on these parts, and the schedules that the request allows.

        A schedule comes with its chunks of a stage.
        """
        figures = []
        places: list[Place] = []
        limits = []
        hosts = []
        # The stages of a group are alike.
        for part in parts:
            stages = part.group.stages
            figures += [part.figures] * stages
            places += part.group.places()
            limits += [self.room(part.group)] * stages
            hosts += [self.request.host_on(part.group.cluster)] * stages
        names = self.request.schedules
        # Merging passes keeps more in flight, and is for what hides under them.
        if not any(part.figures.hidden.any() for part in parts):
            names = without_merged(names)
        count = self.schedule.micro_batches
        cutter = Cutter(
            PieceCosts(figures, count, self.request.cuts),
            places,
            limits,
            hosts,
            self.schedule.unit_bytes,
            blocks=PieceCosts(figures, count, self.request.blocks)
            if self.request.blocks and self.request.cuts is None
            else None,
        )
        schedules = schedules_for(
            len(places),
            count,
            pieces=len(cutter.pieces) - 1,
            names=names,
            interleave=self.request.interleave,
        )
        return cutter, list(schedules)
