"""The input of a local form (an operator, its decision, this rank's place) and its result (a function, attributes)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.ir import Operator, Tensor, Value
from autopar.sharding.layout import Layout, local_shape
from autopar.sharding.mesh import Axes
from autopar.sharding.program import Decision

from .collectives import AxisGroup, Cut, cuts_of

Function = Callable[..., Any]
Cuts = Sequence[Sequence[int]]
"""Fields of `Cut`, as attributes hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCall:
    """An operator with its tensors, its decision and the place of this rank, as a local form sees it."""

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
        return self.inputs[index].shape[dim] // max(self.local_input(index)[dim], 1)

    def cuts(self, layout: Layout) -> tuple[Cut, ...]:
        """The slices that lead from a whole tensor to this rank's shard."""
        return cuts_of(layout, self.mesh, self.coordinate)

    def degree(self, *, reduction: str) -> int:
        """Product of the axis sizes on which factors of this reduction are split."""
        rule = self.decision.rule
        if rule is None:
            return 1
        options = enumerate(self.decision.options)
        return math.prod(self.mesh[a] for a, o in options if o.factor >= 0 and rule.factors[o.factor].reduction == reduction)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOperator:
    """A rank's operator: a function, its attributes in local sizes, and the factor of its result."""

    function: Function
    attributes: Mapping[str, Value]
    scale: float = 1.0
