"""A plan's program by operator: each collective of values belongs to one operator.

A redistribution of a partial sum belongs to the operator that made the partial sum; any other to
its first reader. The collectives of parameters and of their gradients belong to units, which
parameters of several operators share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.costmodel import Cluster
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.ir import Operator
from autopar.order.actions import Word
from autopar.order.execution import execution
from autopar.order.owners import Owners, program_owners
from autopar.order.passes import phases
from autopar.order.scheduled import Scheduled
from autopar.plan import Plan
from autopar.schemes.meanings import Meanings, read_meanings
from autopar.sharding.analysis import Analysis
from autopar.sharding.layout import Kind, Layout
from autopar.sharding.mesh import Axes
from autopar.sharding.program import (
    Collective,
    Compute,
    Decision,
    Redistribute,
    chain_collectives,
    only_casts,
    operator_collectives,
)
from autopar.sharding.redistribution import changed_axes

Seconds = Callable[[Collective], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A redistribution that the program executes, with its priced collectives.

    The collectives of a parameter are those of its `unit`.

    `reduced_later`: the axes of each sum of the gradient in its stored layout.
    """

    tensor: str
    chain: tuple[Layout, ...]
    collectives: tuple[tuple[Collective, float], ...]
    reduced_later: tuple[Axes, ...]
    unit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitAccount:
    """The parameters of a unit, and its collectives in a step with their seconds."""

    parameters: tuple[str, ...]
    collectives: tuple[tuple[Collective, float], ...]


@dataclass(slots=True, kw_only=True)
class OperatorAccount:
    """An operator with its decision and the collectives that belong to it.

    `before`, `after`: the redistributions. `inside`: the collectives that it issues itself.
    """

    operator: Operator
    decision: Decision
    before: list[Move] = field(default_factory=list)
    after: list[Move] = field(default_factory=list)
    inside: tuple[tuple[Collective, float], ...] = ()

    @property
    def collectives(self) -> list[tuple[Collective, float]]:
        """The collectives of one step that belong to this operator, with their seconds."""
        return [
            *self.inside,
            *(pair for move in (*self.before, *self.after) for pair in move.collectives),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """All operators of a plan in order, and the units of its parameters.

    `owners`: of whole matrices, of every chunk that has any. `updates`: the collectives that bring
    matrices to their owners and updates back.
    """

    plan: Plan
    analysis: Analysis
    meanings: Meanings
    operators: tuple[OperatorAccount, ...]
    units: tuple[UnitAccount, ...]
    owners: tuple[Owners, ...] = ()
    updates: tuple[tuple[Collective, float], ...] = ()

    @property
    def shared(self) -> list[tuple[Collective, float]]:
        """The collectives of units of parameters, in one step."""
        return [pair for unit in self.units for pair in unit.collectives]

    @property
    def communication(self) -> float:
        """Seconds of all collectives of one step."""
        parts = [seconds for account in self.operators for _, seconds in account.collectives]
        return math.fsum([*parts, *(seconds for _, seconds in (*self.shared, *self.updates))])

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes."""
        return tuple(axis.name for axis in self.plan.mesh)

    def over(self, axes: Axes) -> str:
        """The names of the axes of a group."""
        return self.plan.mesh_.name(axes)


def has_account(plan: Plan) -> bool:
    """Whether the plan is one program: stages on different meshes are several."""
    return all(stage.mesh == plan.mesh for stage in plan.stages)


def account_of(plan: Plan, analysis: Analysis, cluster: Cluster) -> Account:
    """Assign every collective that the plan's schedule issues to its operator.

    Prices are those of `cluster`.
    """
    micro = execution(plan.assignment(analysis), analysis, plan.schedule.in_stage).micro
    program = micro.program
    prices = MeshPrices(cluster=cluster, mesh=plan.mesh_, unit_bytes=plan.schedule.unit_bytes)
    seconds = prices.collective

    accounts: dict[str, OperatorAccount] = {}
    makers: dict[str, str] = {}
    waiting: dict[tuple[str, Layout], Move] = {}
    unit_of = {index: unit.number for unit in micro.units for index in unit.members}
    for index, (step, times) in enumerate(zip(program.steps, executions(micro), strict=True)):
        if isinstance(step, Compute):
            _compute(step, accounts, makers, waiting)
            talk = (
                operator_collectives(program.graph, step, plan.mesh_.shape, analysis.gradients)
                if step.decision.rule
                else []
            )
            accounts[step.operator.name].inside = tuple((c, seconds(c)) for c in times.of(talk))
            continue
        if only_casts(step):
            continue
        move = _move(step, micro, plan.mesh_.shape, times, seconds, unit_of.get(index))
        maker = makers.get(step.tensor)
        if maker is not None and any(placement.kind is Kind.PARTIAL for placement in step.chain[0]):
            accounts[maker].after.append(move)
        else:
            waiting[step.tensor, step.chain[-1]] = move
    for move in waiting.values():  # the model's outputs have no reader
        if move.tensor in makers:
            accounts[makers[move.tensor]].after.append(move)
    shown = tuple(accounts[op.name] for op in analysis.warm)
    units = tuple(_units(micro, seconds))
    owners: tuple[Owners, ...] = ()
    if micro.updates_whole:
        chunks = plan.execution(analysis).chunks if plan.stages else ()
        programs = [chunk.micro.program for chunk in chunks] or [program]
        owners = tuple(one for one in map(program_owners, programs) if one.exchanges)
    return Account(
        plan=plan,
        analysis=analysis,
        meanings=read_meanings(analysis),
        operators=shown,
        units=units,
        owners=owners,
        updates=tuple((c, seconds(c)) for o in owners for c in (*o.gathers(), *o.returns())),
    )


def _units(micro: Scheduled, seconds: Seconds) -> Iterator[UnitAccount]:
    """The units with the collectives that they issue in one step."""
    issued: dict[int, list[tuple[Collective, float]]] = {unit.number: [] for unit in micro.units}
    actions = micro.actions()
    for action, phase in zip(actions, phases(actions), strict=True):
        if action.unit is not None:
            issued[action.unit] += (
                (replace(c, phase=phase), seconds(c)) for c in micro.issued(action)
            )
    steps = micro.program.steps
    for unit in micro.units:
        names = dict.fromkeys(
            step.tensor for index in unit.members if isinstance(step := steps[index], Redistribute)
        )
        yield UnitAccount(parameters=tuple(names), collectives=tuple(issued[unit.number]))


@dataclass(slots=True)
class _Times:
    """The runs of a segment in a step: forward, recomputed for a backward pass, and backward."""

    forward: int = 0
    recomputed: int = 0
    backward: int = 0

    def of(self, collectives: Iterable[Collective]) -> list[Collective]:
        """The collectives of these executions."""
        executed = []
        for c in collectives:
            executed += [c] * (self.forward if c.phase == "forward" else self.backward)
            if c.phase == "forward":
                executed += [replace(c, phase="backward")] * self.recomputed
        return executed


def executions(micro: Scheduled) -> list[_Times]:
    """The executions of every step of a micro-batch's program in one step of training."""
    times = [_Times() for _ in micro.program.steps]
    for action in micro.actions():
        if action.segment is not None:
            segment = micro.segments[action.segment]
            backward = action.word is Word.BACKWARD
            for index in segment.steps:
                times[index].forward += not backward
                times[index].recomputed += backward and segment.recomputed
                times[index].backward += backward
    return times


def _compute(
    step: Compute,
    accounts: dict[str, OperatorAccount],
    makers: dict[str, str],
    waiting: dict[tuple[str, Layout], Move],
) -> None:
    """Open the account of an operator, with the redistributions that lead to its inputs."""
    account = OperatorAccount(operator=step.operator, decision=step.decision)
    for name, layout in zip(step.operator.inputs, step.decision.inputs, strict=True):
        chain = []
        while (name, layout) in waiting:
            chain.append(waiting.pop((name, layout)))
            layout = chain[-1].chain[0]
        account.before += reversed(chain)
    accounts[step.operator.name] = account
    makers.update(dict.fromkeys(step.operator.outputs, step.operator.name))


def _move(
    step: Redistribute,
    micro: Scheduled,
    mesh: Sequence[int],
    times: _Times,
    seconds: Seconds,
    unit: int | None,
) -> Move:
    forward, backward = chain_collectives(micro.program.graph, step, mesh, micro.schedule.types)
    priced = tuple(
        (collective, seconds(collective)) for collective in times.of((*forward, *backward))
    )
    bucketed = zip(step.chain[: step.bucketed], step.chain[1:], strict=False)
    later = tuple(changed_axes(before, after) for before, after in bucketed)
    return Move(
        tensor=step.tensor, chain=step.chain, collectives=priced, reduced_later=later, unit=unit
    )
