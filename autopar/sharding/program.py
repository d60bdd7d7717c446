"""The local program of a plan, free of any framework: operators and redistributions in order.

The cost model prices this program and the runtime executes it, so the priced collectives are the
issued ones. Values are addressed by (tensor, layout). A redistribution makes one more layout of a
tensor available, once for all its readers. The order of the step (`autopar/order`) decides when
each collective is issued.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.errors import PlanError
from autopar.ir import Graph, Operator, Role

from .communication import operator_traffic
from .layout import Kind, Layout, format_layout, is_valid, replicated
from .mesh import Axes, Mesh
from .notation import Rule
from .redistribution import change, changed_axes, is_step, local_bytes
from .rules import Call
from .schedule import PLAIN, Types
from .strategies import Option, Strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a step over a group of mesh axes.

    `phase` is forward, backward or update; `nbytes` by the collective's convention.
    """

    phase: str
    kind: str
    axes: Axes
    nbytes: int
    tensor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan's decision for one operator: its options by axis, and the layouts that follow."""

    options: tuple[Option, ...]
    rule: Rule | None
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


def talking(decision: Decision) -> tuple[Axes, ...]:
    """The axes of each option that communicates inside the operator, by factor."""
    axes_of: dict[tuple[str, int], list[int]] = {}
    for axis, option in enumerate(decision.options):
        if option.communication is not None:
            axes_of.setdefault((option.communication, option.factor), []).append(axis)
    return tuple(map(tuple, axes_of.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribute:
    """Redistribute `tensor` along the layouts of `chain`.

    `gradient`: whether the loss's backward pass runs through it. `differentiable`: whether a
    gradient may come back at all, including one from a loss that the caller computes from the
    outputs. The first `bucketed` steps (R → B of a parameter) are not executed one by one: their
    backward all-reduce is part of a gradient bucket.
    """

    tensor: str
    chain: tuple[Layout, ...]
    gradient: bool
    differentiable: bool = False
    bucketed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run `operator` on the local shards."""

    operator: Operator
    decision: Decision


Step = Redistribute | Compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients of `parameters` that are summed together, by one all-reduce for each of `sums`.

    Low-rank gradients have two buckets, one after the other: `factor` is 1 and 2, and `ranks` holds
    the columns of the factors. Plain gradients have `factor` 0.
    """

    parameters: tuple[str, ...]
    sums: tuple[Axes, ...]
    nbytes: int
    factor: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """All decisions of a plan inside one stage; `chains` lists every redistribution that it
    executes.

    `host`: the parameters whose optimizer state is in the memory of the device's host.
    """

    mesh: Mesh
    decisions: Mapping[str, Decision]
    storage: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    chains: Mapping[str, tuple[tuple[Layout, ...], ...]]
    gradients: frozenset[str] = field(default_factory=frozenset)
    host: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Steps in execution order, and where every value lies."""

    graph: Graph
    assignment: Assignment
    steps: tuple[Step, ...]


def inputs_read(program: Program) -> tuple[tuple[str, Layout], ...]:
    """The model's inputs with every layout in which they are read."""
    tensors = program.graph.tensors
    computed = (step for step in program.steps if isinstance(step, Compute))
    read = [
        pair
        for step in computed
        for pair in zip(step.operator.inputs, step.decision.inputs, strict=True)
    ]
    return tuple(
        dict.fromkeys(
            pair
            for pair in (*read, *program.assignment.outputs.items())
            if tensors[pair[0]].role is Role.INPUT
        )
    )


def operator_collectives(
    graph: Graph, step: Compute, mesh: Sequence[int], gradients: frozenset[str]
) -> list[Collective]:
    """The collectives that an operator issues inside itself, forward, then backward."""
    operator = step.operator
    decision = step.decision
    assert decision.rule is not None
    # Written as a table of one strategy, so that the search's prices and this list come from one
    # function.
    options = tuple(dict.fromkeys(decision.options))
    choice = np.array([[options.index(option) for option in decision.options]], dtype=np.int64)
    strategies = Strategies(rule=decision.rule, options=options, choices=choice)
    traffic = list(operator_traffic(Call.of(graph, operator), strategies, mesh, gradients))
    ordered = [
        (axes, move) for _, axes, moves in traffic for move in moves if move.phase == "forward"
    ]
    ordered += [
        (axes, move)
        # Backward, exchanges along several factors come in the opposite order, but the moves of
        # each are listed as they are issued.
        for _, axes, moves in reversed(traffic)
        for move in moves
        if move.phase == "backward"
    ]
    return [
        Collective(
            phase=move.phase,
            kind=move.kind,
            axes=axes,
            nbytes=round(float(move.nbytes[0])),
            tensor=operator.outputs[0],
        )
        for axes, move in ordered
    ]


def chain_collectives(
    graph: Graph, step: Redistribute, mesh: Sequence[int], types: Types = PLAIN.types
) -> tuple[list[Collective], list[Collective]]:
    """The collectives of one redistribution in forward order: (forward ones, backward ones)."""
    tensor = graph.tensors[step.tensor]
    forward: list[Collective] = []
    backward: list[Collective] = []
    for index, (before, after) in enumerate(itertools.pairwise(step.chain)):
        moved = change(before, after, mesh)
        ahead, back = moved.transfers
        if ahead:
            size = ahead.scale * local_bytes(before, tensor.bytes, mesh)
            forward.append(
                Collective(
                    phase="forward",
                    kind=ahead.collective,
                    axes=moved.axes,
                    nbytes=size,
                    tensor=step.tensor,
                )
            )
        # Gradients of parameters may travel in another type than values; the shard is the same.
        if back and step.gradient and index >= step.bucketed:
            size = back.scale * local_bytes(before, types.reduced_bytes(tensor), mesh)
            backward.append(
                Collective(
                    phase="backward",
                    kind=back.collective,
                    axes=moved.axes,
                    nbytes=size,
                    tensor=step.tensor,
                )
            )
    return forward, backward


def departure(step: Redistribute, mesh: Sequence[int]) -> int | None:
    """The index of the first step of a chain that communicates; None if none does.

    From there to the first reader the chain runs alongside computation.
    """
    for number, (before, after) in enumerate(itertools.pairwise(step.chain)):
        moved = change(before, after, mesh)
        ahead, back = moved.transfers
        if moved.degree > 1 and (ahead or (back and step.differentiable)):
            return number
    return None


def build_program(
    graph: Graph,
    assignment: Assignment,
    *,
    operators: Sequence[Operator] | None = None,
    arrivals: Mapping[str, Layout] | None = None,
    ends: Collection[str] | None = None,
) -> Program:
    """Place each redistribution before its first reader.

    Raises a `PlanError` that names one that the assignment lacks.

    For a part of the model: `operators` are the ones to run, `arrivals` the tensors that come from
    elsewhere, `ends` the values at which the backward pass begins (by default the loss).
    """
    builder = _Builder(graph, assignment)
    builder.available.update((name, {layout}) for name, layout in (arrivals or {}).items())
    for operator in graph.operators if operators is None else operators:
        decision = assignment.decisions[operator.name]
        for name, layout in zip(operator.inputs, decision.inputs, strict=True):
            builder.bring(name, layout)
        builder.steps.append(Compute(operator=operator, decision=decision))
        for name, layout in zip(operator.outputs, decision.outputs, strict=True):
            builder.available[name] = {layout}
    for name, layout in assignment.outputs.items():
        builder.bring(name, layout)
    made = {
        name: layout
        for step in builder.steps
        if isinstance(step, Compute)
        for name, layout in _given(step)
    }
    # Ends that this part does not make are another's concern.
    needed = {(name, made[name]) for name in ends or () if name in made}
    if graph.loss is not None and graph.loss in assignment.outputs:
        needed.add((graph.loss, assignment.outputs[graph.loss]))
    # Gradients are marked first, since only redistributions with one are bucketed.
    steps = _mark_bucketed(graph, assignment, _mark_gradients(assignment, builder.steps, needed))
    return Program(graph=graph, assignment=assignment, steps=steps)


class _Builder:
    """Keeps which layouts of every tensor exist at the current point of the program."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self.graph = graph
        self.assignment = assignment
        self.steps: list[Step] = []
        # Inputs and constants are whole on every device, and readers slice them.
        whole = replicated(len(assignment.mesh.axes))
        self.available = {
            tensor.name: {assignment.storage.get(tensor.name, whole)}
            for tensor in graph.tensors.values()
            if tensor.role is not Role.ACTIVATION
        }
        self.chains = {
            name: {chain[-1]: chain for chain in chains if chain}
            for name, chains in assignment.chains.items()
        }

    def bring(self, name: str, layout: Layout) -> None:
        """Make `layout` of tensor `name` available, after the layout that its chain starts from."""
        if layout in self.available[name]:
            return
        # Taken out, so that a plan whose chains lead in a circle ends in the error below.
        chain = self.chains.get(name, {}).pop(layout, None)
        if chain is None:
            raise PlanError(
                f"the plan has no redistribution of {name!r} to [{format_layout(layout)}]"
            )
        self.bring(name, chain[0])
        shape = self.graph.tensors[name].shape
        mesh = self.assignment.mesh.shape
        # Plans come from files, too, which may have been changed by hand.
        for before, after in itertools.pairwise(chain):
            if not is_valid(after, shape, mesh) or not is_step(before, after):
                raise PlanError(
                    f"the plan moves {name!r} from [{format_layout(before)}] to "
                    f"[{format_layout(after)}], which is no single step"
                )
        self.available[name].add(layout)
        self.steps.append(
            Redistribute(
                tensor=name,
                chain=chain,
                gradient=False,
                differentiable=name in self.assignment.gradients,
            )
        )


def _given(step: Compute) -> Iterator[tuple[str, Layout]]:
    """An operator's outputs and their layouts."""
    return zip(step.operator.outputs, step.decision.outputs, strict=True)


def _mark_gradients(
    assignment: Assignment, steps: Sequence[Step], needed: set[tuple[str, Layout]]
) -> list[Step]:
    """Mark the redistributions that lead to `needed` values through operators, from the last step
    backwards.
    """
    marked: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Compute):
            if any(name in assignment.gradients for name in step.operator.outputs):
                needed.update(zip(step.operator.inputs, step.decision.inputs, strict=True))
        elif step.differentiable and (step.tensor, step.chain[-1]) in needed:
            # A chain may start where another ends: the one before it then needs a gradient as well.
            needed.add((step.tensor, step.chain[0]))
            step = replace(step, gradient=True)
        marked.append(step)
    return marked[::-1]


def _leading(chain: tuple[Layout, ...]) -> tuple[Axes, ...]:
    """The axes of the leading R → B steps of a chain."""
    leading = []
    for before, after in itertools.pairwise(chain):
        axes = changed_axes(before, after)
        if (before[axes[0]].kind, after[axes[0]].kind) != (Kind.REPLICATED, Kind.BROADCAST):
            break
        leading.append(axes)
    return tuple(leading)


def _mark_bucketed(graph: Graph, assignment: Assignment, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Mark the leading R → B steps that all uses of a parameter share: their gradients are reduced
    in buckets.
    """
    leading: dict[str, tuple[Axes, ...]] = {}
    for step in steps:
        if (
            isinstance(step, Redistribute)
            and step.gradient
            and graph.tensors[step.tensor].role is Role.PARAMETER
        ):
            if step.chain[0] == assignment.storage[step.tensor]:
                # Uses that start with the same sums share them; if they differ, each use has its
                # own.
                axes = _leading(step.chain)
                leading[step.tensor] = axes if leading.get(step.tensor, axes) == axes else ()
        elif isinstance(step, Compute) and any(
            name in assignment.gradients for name in step.operator.outputs
        ):
            for name, layout in zip(step.operator.inputs, step.decision.inputs, strict=True):
                # Such a reader gives every rank the same gradient, and a sum shared with other uses
                # would count it once a rank.
                if layout == assignment.storage.get(name):
                    leading[name] = ()
    return tuple(
        replace(step, bucketed=len(leading[step.tensor]))
        if isinstance(step, Redistribute)
        and step.gradient
        and leading.get(step.tensor)
        and step.chain[0] == assignment.storage[step.tensor]
        else step
        for step in steps
    )
