"""Redistributions of a unit's parameters that travel together, in one message for each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from autopar.order.scheduled import Scheduled
from autopar.order.value_flow import PlacedValue
from autopar.runtime.local_forms.narrow_weights import WeightCast
from autopar.runtime.ranks.device_groups import AxisGroup
from autopar.runtime.redistribution.steps import Move, step_actions
from autopar.sharding.layout import local_shape
from autopar.sharding.mesh import Axes
from autopar.sharding.program import Redistribute, moves_value, only_casts
from autopar.sharding.redistribution import changed_axes

Over = Callable[[Axes], AxisGroup]
"""This rank's group over mesh axes."""


class JointRedistribution:
    """Redistributions that travel together: where they start and end, and the steps between.

    `flows`: their gradients travel back. `moves`: the value itself changes. `leads`: there is more
    to do than a cast. `cuts`: their gradients end as parts of whole sums. `casts`: those to narrow
    copies, with the groups over which largest elements are `summed`, by the kind of scale (None: a
    rank has all of its blocks).
    """

    def __init__(
        self,
        plan: Scheduled,
        members: Sequence[int],
        over: Over,
        coordinate: Sequence[int],
        device: torch.device,
    ) -> None:
        steps = [plan.program.steps[index] for index in members]
        redistributions = [step for step in steps if isinstance(step, Redistribute)]
        tensors = plan.program.graph.tensors
        mesh = plan.program.assignment.mesh.shape
        first = redistributions[0]
        self.starts: list[PlacedValue] = [(step.tensor, step.chain[0]) for step in redistributions]
        self.ends: list[PlacedValue] = [(step.tensor, step.chain[-1]) for step in redistributions]
        self.flows = first.gradient
        self.moves = moves_value(first)
        self.leads = not only_casts(first)
        self.differentiable = first.differentiable
        self.shapes = [local_shape(layout, tensors[name].shape, mesh) for name, layout in self.ends]
        self.casts: list[WeightCast] = []
        if self.moves and tensors[first.tensor].narrow is not None:
            self.casts = [
                WeightCast.of(
                    tensors[step.tensor], (step.chain[0], step.chain[-1]), mesh, coordinate, device
                )
                for step in redistributions
            ]
        self.summed = [over(s.axes) if s.axes else None for c in self.casts[:1] for s in c.scales]
        self.ahead: list[tuple[list[Move], AxisGroup]] = []
        self.back: list[tuple[list[Move], AxisGroup]] = []
        # All members go the same way, step by step; what their buckets sum is not part of it.
        chains = [list(itertools.pairwise(step.chain[step.bucketed :])) for step in redistributions]
        for pairs in zip(*chains, strict=True):
            group = over(changed_axes(*pairs[0]))
            actions = [step_actions(before, after, mesh) for before, after in pairs]
            self.ahead.append(([ahead for ahead, _ in actions], group))
            self.back.insert(0, ([back for _, back in actions], group))
        self.cuts = bool(self.back) and self.back[-1][0][0].name == "take"
