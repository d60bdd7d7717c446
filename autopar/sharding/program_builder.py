"""The program of an assignment: every redistribution stands before its first reader.

Redistributions that a gradient comes back through are marked, and of these the leading R → B steps
of parameters, whose gradients are reduced in buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir import Graph, Operator, Role

from .layout import Kind, Layout, format_layout, is_valid, replicated
from .mesh import Axes
from .program import Assignment, Compute, Program, Redistribute, Step
from .redistribution import changed_axes, is_step


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
    elsewhere, `ends` the values at which the backward pass begins beside the loss.
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
