"""Factors of gradients, applied when they are reduced."""

from __future__ import annotations

import itertools
import math

from autopar.order.scheduled import Scheduled
from autopar.sharding.program import Redistribute
from autopar.sharding.redistribution import change


def gradient_factors(plan: Scheduled) -> dict[str, float]:
    """Each parameter's gradient factor: the weight; with `mean`, divided by the ranks whose shares are summed."""
    reductions, mesh = plan.schedule.reductions, plan.program.assignment.mesh.shape
    axes: dict[str, set[int]] = {tensor.name: set() for tensor in plan.program.graph.parameters}
    for step in plan.program.steps:
        if isinstance(step, Redistribute) and step.gradient and step.tensor in axes and step.tensor not in reductions.local:
            for before, after in itertools.pairwise(step.chain):
                moved = change(before, after, mesh)
                back = moved.transfers[1]
                if back is not None and back.collective in ("all_reduce", "reduce_scatter"):
                    axes[step.tensor].update(moved.axes)
    shares = {name: math.prod(mesh[axis] for axis in found) if reductions.mean else 1 for name, found in axes.items()}
    return {name: reductions.weight / count for name, count in shares.items()}
