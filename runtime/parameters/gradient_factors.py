"""The factors that scale a step's gradients when they have been reduced."""

from __future__ import annotations

import itertools
import math

from autopar.order.scheduled import Scheduled
from autopar.sharding.layout import Layout
from autopar.sharding.program import Redistribute
from autopar.sharding.redistribution import change


def gradient_factors(plan: Scheduled) -> dict[str, float]:
    """The factor of each parameter's gradient: the planned weight of sums.

    With `mean` it is divided by the number of ranks whose shares are summed.
    """
    reductions = plan.schedule.reductions
    mesh = plan.program.assignment.mesh.shape
    summed: dict[str, set[int]] = {tensor.name: set() for tensor in plan.program.graph.parameters}
    for step in plan.program.steps:
        if not isinstance(step, Redistribute) or not step.gradient:
            continue
        if step.tensor in summed and step.tensor not in reductions.local:
            for before, after in itertools.pairwise(step.chain):
                summed[step.tensor].update(_summing_axes(before, after, mesh))
    factors = {}
    for name, axes in summed.items():
        shares = math.prod(mesh[axis] for axis in axes) if reductions.mean else 1
        factors[name] = reductions.weight / shares
    return factors


def _summing_axes(before: Layout, after: Layout, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """The axes over which a step's backward pass sums gradients."""
    moved = change(before, after, mesh)
    back = moved.transfers[1]
    if back is None or back.collective not in ("all_reduce", "reduce_scatter"):
        return ()
    return tuple(moved.axes)
