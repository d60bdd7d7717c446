"""The input and the result of a local form.

In comes an operator with its decision and this rank's place, out goes a function with attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.ir import Operator, Tensor, Value
from autopar.runtime.ranks.cuts import Cut, cuts_of
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.sharding.layout import Layout, local_shape
from autopar.sharding.mesh import Axes
from autopar.sharding.program import Decision

Function = Callable[..., Any]
Cuts = Sequence[Sequence[int]]
"""Fields of `Cut`, as attributes hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCall:
    """An operator with its tensors, its decision and the place of this rank."""

    operator: Operator
    decision: Decision
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    groups: tuple[AxisGroup, ...] = ()
    joint: Mapping[Axes, AxisGroup] = field(default_factory=dict)

    def over(self, axes: Axes) -> AxisGroup:
        """The group over one axis or several."""
        return self.groups[axes[0]] if len(axes) == 1 else self.joint[axes]

    def local_input(self, index: int) -> tuple[int, ...]:
        """Local shape of an input."""
        return local_shape(self.decision.inputs[index], self.inputs[index].shape, self.mesh)

    def local_output(self, index: int = 0) -> tuple[int, ...]:
        """Local shape of an output."""
        return local_shape(self.decision.outputs[index], self.outputs[index].shape, self.mesh)

    def split(self, index: int, dim: int) -> int:
        """The number of shards of dim `dim` of input `index`."""
        # An empty dim has empty shards, and as many of them as one likes.
        return self.inputs[index].shape[dim] // max(self.local_input(index)[dim], 1)

    def cuts(self, layout: Layout) -> tuple[Cut, ...]:
        """The slices that lead from a whole tensor to this rank's shard."""
        return cuts_of(layout, self.mesh, self.coordinate)

    def degree(self, *, reduction: str) -> int:
        """The product of the sizes of axes that split factors of this reduction."""
        rule = self.decision.rule
        if rule is None:
            return 1
        degree = 1
        for size, option in zip(self.mesh, self.decision.options, strict=False):
            # A negative factor: the axis splits no factor of the operator.
            if option.factor >= 0 and rule.factors[option.factor].reduction == reduction:
                degree *= size
        return degree


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOperator:
    """A rank's operator: a function, its attributes in local sizes, and its result's factor."""

    function: Function
    attributes: Mapping[str, Value]
    scale: float = 1.0
