"""Seconds of casts: parameters from the master's type to the computation's, gradients to the type in which they travel.

A cast of n elements reads and writes each once:

    seconds = n (bytes before + bytes after) / bandwidth + launch

Adding gradients to those of earlier micro-batches takes three passes over them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Role, Tensor
from autopar.order.scheduled import Mode, Scheduled
from autopar.order.value_flow import moves_value
from autopar.sharding.layout import Layout
from autopar.sharding.program import Redistribute
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.schedule import Types

from ..cluster.model import Cluster
from ..device.elementwise import memory_seconds, with_launch

Floats = NDArray[np.float64]


def cast_seconds(tensor: Tensor, shards: NDArray[np.int64], cluster: Cluster, types: Types) -> Floats:
    """Seconds of casting a parameter stored in 1 of `shards` shards, once: array [layouts]."""
    if not types.casts(tensor):
        return np.zeros(len(shards))
    return with_launch(0.0, memory_seconds((types.stored_bytes(tensor) + tensor.bytes) / shards, cluster.device), cluster.device)


def unit_seconds(plan: Scheduled, cluster: Cluster) -> dict[int, float]:
    """For every unit whose shards are cast when it is gathered: seconds of the casts."""
    found: dict[int, float] = {}
    types, tensors, mesh = plan.schedule.types, plan.program.graph.tensors, plan.program.assignment.mesh.shape
    for unit in plan.units:
        steps = [step for index in unit.members if isinstance(step := plan.program.steps[index], Redistribute) and moves_value(step)]
        cast = [step for step in steps if types.casts(tensors[step.tensor])]
        nbytes = [local_bytes(s.chain[0], types.stored_bytes(tensors[s.tensor]) + tensors[s.tensor].bytes, mesh) for s in cast]
        if nbytes:
            found[unit.number] = float(with_launch(0.0, memory_seconds(np.array(nbytes), cluster.device), cluster.device).sum())
    return found


def gradient_seconds(plan: Scheduled, gradients: frozenset[str], cluster: Cluster) -> tuple[float, float]:
    """Seconds of casting gradients: in each backward pass, and once a step the sums to the stored type."""
    types, tensors, mesh = plan.schedule.types, plan.program.graph.tensors, plan.program.assignment.mesh.shape
    used: dict[str, float] = {}
    home: dict[str, float] = {}
    for name, layout in _places(plan):
        tensor, summed = tensors[name], types.reduced_bytes(tensors[name])
        if name in gradients and types.reduced(tensor) != tensor.dtype:
            used[name] = max(used.get(name, 0.0), local_bytes(layout, tensor.bytes + summed, mesh))
        if name in gradients and types.reduced(tensor) != types.stored(tensor):
            home[name] = local_bytes(plan.program.assignment.storage[name], summed + types.stored_bytes(tensor), mesh)
    passes, once = (with_launch(0.0, memory_seconds(np.array(list(f.values())), cluster.device), cluster.device) for f in (used, home))
    return float(passes.sum()), float(once.sum())


def adding_seconds(plan: Scheduled, gradients: frozenset[str], cluster: Cluster) -> float:
    """Seconds of adding a micro-batch's gradients to earlier ones, in the layout where they are added up."""
    program, types, mesh = plan.program, plan.schedule.types, plan.program.assignment.mesh.shape
    moved = ((step, plan.modes.get(index)) for index, step in enumerate(program.steps))
    once = {step.tensor: step.chain[-1] for step, mode in moved if isinstance(step, Redistribute) and mode is Mode.ONCE}
    trained = [tensor for tensor in program.graph.parameters if tensor.name in gradients]
    places = [once.get(tensor.name, program.assignment.storage[tensor.name]) for tensor in trained]
    nbytes = [3 * local_bytes(layout, types.reduced_bytes(tensor), mesh) for tensor, layout in zip(trained, places, strict=True)]
    return float(with_launch(0.0, memory_seconds(np.array(nbytes), cluster.device), cluster.device).sum()) if nbytes else 0.0


def _places(plan: Scheduled) -> Iterator[tuple[str, Layout]]:
    """The used and stored layouts of parameters."""
    yield from plan.program.assignment.storage.items()
    for step in plan.program.steps:
        if isinstance(step, Redistribute) and plan.program.graph.tensors[step.tensor].role is Role.PARAMETER:
            yield step.tensor, step.chain[-1]
