"""The mesh as an operator sees it: on micro-batches it has one axis more, that of time.

A micro-batch is a coordinate on the axis of time (see `sharding.time_split`), and local sizes and
shards follow as on any other axis. Nothing is communicated on it: inputs and constants come cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.ir import Ref, Role
from autopar.order.scheduled import Scheduled
from autopar.runtime.operators.local_call import LocalCall, LocalOperator
from autopar.runtime.ranks.device_groups import AxisGroup, DeviceGroups
from autopar.sharding.layout import B, Kind, Layout, P, Placement, R, S
from autopar.sharding.mesh import Axes
from autopar.sharding.program import Compute, Decision
from autopar.sharding.rules import RULES, Call, rule_of
from autopar.sharding.strategies import Option

from .localise import localise
from .program import Place, Time


class Frame:
    """Sizes, coordinates and groups of all axes, and where tensors lie on them."""

    def __init__(self, plan: Scheduled, groups: DeviceGroups, time: Time | None) -> None:
        program = plan.program
        # A plan for other ranks would fail in the first collective, with no word of why.
        if groups.mesh.shape != program.assignment.mesh.shape:
            raise PlanError(
                f"the plan is for the mesh {program.assignment.mesh}, the ranks form {groups.mesh}"
            )
        self.program = program
        self.model = program.graph
        self.time = time
        self.axes = groups.mesh.axes
        self.mesh = groups.mesh.shape
        self.coordinate = groups.coordinate
        self.groups = groups.axes
        # Axes of the plan's mesh move by one where the axis of time comes first.
        self.joint = {
            tuple(axis + (time is not None) for axis in axes): group
            for axes, group in groups.joint.items()
        }
        if time is not None:
            self.mesh = (time.count, *self.mesh)
            self.coordinate = (time.index, *self.coordinate)
            self.groups = (AxisGroup("", time.count, time.index), *self.groups)

    def over(self, axes: Axes) -> AxisGroup:
        """The group over axes as this mesh counts them; that of time is never one of several."""
        return self.groups[axes[0]] if len(axes) == 1 else self.joint[axes]

    def joined(self, name: str, layout: Layout) -> Layout:
        """An output's layout when all micro-batches are joined.

        Its samples are split within each micro-batch.
        """
        if self.time is None:
            return layout
        time = self.placement(name)
        if time.kind is not Kind.SPLIT:
            return layout
        within = S(time.dim, time.parts * self.time.count)
        return tuple(within if placement == time else placement for placement in layout)

    def runs(self, item: Compute) -> bool:
        """Whether an operator is part of this program.

        A micro-batch's program lacks the operators of the preamble, which run once a step.
        """
        return (
            self.time is None
            or item.decision.rule is not None
            or item.operator.name in self.time.split.options
        )

    def placement(self, name: str) -> Placement:
        """A tensor's placement on the axis of time.

        Parameters are whole there, and their gradients are shares.
        """
        assert self.time is not None
        if self.model.tensors[name].role is Role.PARAMETER:
            return B if name in self.program.assignment.gradients else R
        return self.time.split.placements[name]

    def layout(self, layout: Layout, placement: Placement) -> Layout:
        """A layout with its placement on the axis of time, where there is one."""
        return layout if self.time is None else (placement, *layout)

    def place(self, name: str, layout: Layout) -> Place:
        """The place of a tensor's value; parameters have their layouts alone."""
        if self.time is None or self.model.tensors[name].role is Role.PARAMETER:
            return name, layout
        return name, (self.placement(name), *layout)

    def decision(self, item: Compute) -> Decision:
        """The decision for an operator, on all axes."""
        decision = item.decision
        if self.time is None or item.operator.name not in self.time.split.options:
            return decision
        option = self.time.split.options[item.operator.name]
        rule = decision.rule
        options = decision.options
        if rule is None:
            # The plan left the operator whole; only time splits it, so the other axes repeat it.
            rule = rule_of(Call.of(self.model, item.operator))
            inputs = (R,) * len(item.operator.inputs)
            outputs = (R,) * len(item.operator.outputs)
            whole = Option(name="R", factor=-1, parts=1, inputs=inputs, outputs=outputs)
            options = (whole,) * len(self.axes)
        return Decision(
            options=(option, *options),
            rule=rule,
            inputs=self._with_time(decision.inputs, option.inputs),
            outputs=self._with_time(decision.outputs, option.outputs),
        )

    def _with_time(
        self, layouts: Sequence[Layout], placements: Sequence[Placement]
    ) -> tuple[Layout, ...]:
        """Layouts with their placements on the axis of time."""
        pairs = zip(layouts, placements, strict=True)
        return tuple(self.layout(layout, placement) for layout, placement in pairs)

    def inputs(self, item: Compute) -> list[Place]:
        """The places of an operator's inputs; parameters have their layouts alone."""
        tensors = self.model.tensors
        plain = zip(
            item.operator.inputs, item.decision.inputs, self.decision(item).inputs, strict=True
        )
        return [
            self.place(name, layout)
            if self.gives_share(name, whole)
            else (name, layout if tensors[name].role is Role.PARAMETER else whole)
            for name, layout, whole in plain
        ]

    def shared(self, item: Compute) -> list[bool]:
        """Which inputs of an operator every micro-batch has whole, and gives a share of."""
        pairs = zip(item.operator.inputs, self.decision(item).inputs, strict=True)
        return [self.gives_share(name, layout) for name, layout in pairs]

    def gives_share(self, name: str, layout: Layout) -> bool:
        """Whether a tensor that is whole over time is read as a share of a sum there."""
        wanted = self.time is not None and layout[0] == P
        return wanted and self.placement(name) != P

    def outputs(self, item: Compute) -> list[Place]:
        """The places of an operator's outputs."""
        return list(zip(item.operator.outputs, self.decision(item).outputs, strict=True))

    def local(self, item: Compute) -> LocalOperator:
        """The local form of an operator."""
        tensors = self.model.tensors
        operator = item.operator
        call = LocalCall(
            operator=operator,
            decision=self.decision(item),
            inputs=tuple(tensors[name] for name in operator.inputs),
            outputs=tuple(tensors[name] for name in operator.outputs),
            mesh=self.mesh,
            coordinate=self.coordinate,
            groups=self.groups,
            joint=self.joint,
        )
        return localise(call)

    def weights(self, item: Compute) -> dict[str, Place]:
        """The arguments of a matrix product that are parameters with a gradient, by their names.

        Empty where every operand is a parameter: such a product has no gradient of values to go
        first.
        """
        operator = item.operator
        gradients = self.program.assignment.gradients
        # Only products have gradients for weights apart from those for values.
        entry = RULES.get(operator.kind)
        if entry is None or not entry.products or len(operator.outputs) != 1:
            return {}
        places = self.inputs(item)
        roles = [self.model.tensors[name].role for name in operator.inputs]
        if all(role is Role.PARAMETER for role in roles):
            return {}
        weights = {}
        for name, value in operator.attributes.items():
            if not isinstance(value, Ref) or roles[value.index] is not Role.PARAMETER:
                continue
            if operator.inputs[value.index] in gradients:
                weights[name] = places[value.index]
        return weights
