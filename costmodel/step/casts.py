"""Seconds of casts of parameters and gradients.

Parameters go from the master's type to the computation's, gradients to the type in which they
travel. A cast of n elements reads and writes each once:

    seconds = n (bytes before + bytes after) / bandwidth + launch

Adding gradients to those of earlier micro-batches takes three passes over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.device.elementwise import memory_seconds, with_launch
from autopar.costmodel.frameworks import Habits
from autopar.ir import Role, Tensor
from autopar.order.scheduled import Mode, Scheduled
from autopar.sharding.layout import Layout
from autopar.sharding.program import Redistribute, moves_value
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.schedule import Types

Floats = NDArray[np.float64]


def cast_seconds(
    tensor: Tensor, shards: NDArray[np.int64], cluster: Cluster, types: Types
) -> Floats:
    """Seconds of casting a parameter stored in 1 of `shards` shards, once: array [layouts]."""
    if not types.casts(tensor):
        return np.zeros(len(shards))
    return with_launch(
        0.0, memory_seconds(types.cast_bytes(tensor) / shards, cluster.device), cluster.device
    )


def unit_seconds(plan: Scheduled, cluster: Cluster) -> dict[int, float]:
    """The seconds of the casts of every unit whose shards are cast when it is gathered."""
    seconds: dict[int, float] = {}
    types = plan.schedule.types
    tensors = plan.program.graph.tensors
    mesh = plan.program.assignment.mesh.shape
    for unit in plan.units:
        steps = [
            step
            for index in unit.members
            if isinstance(step := plan.program.steps[index], Redistribute) and moves_value(step)
        ]
        cast = [step for step in steps if types.casts(tensors[step.tensor])]
        nbytes = [local_bytes(s.chain[0], types.cast_bytes(tensors[s.tensor]), mesh) for s in cast]
        if nbytes:
            seconds[unit.number] = float(
                with_launch(
                    0.0, memory_seconds(np.array(nbytes), cluster.device), cluster.device
                ).sum()
            )
    return seconds


def gradient_seconds(
    plan: Scheduled, gradients: frozenset[str], cluster: Cluster
) -> tuple[float, float]:
    """Return the seconds of casting gradients in each backward pass, and once a step.

    Once a step the sums are cast to the stored type.
    """
    types = plan.schedule.types
    tensors = plan.program.graph.tensors
    mesh = plan.program.assignment.mesh.shape
    home = {
        tensor.name: local_bytes(
            plan.program.assignment.storage[tensor.name],
            types.reduced_bytes(tensor) + types.stored_bytes(tensor),
            mesh,
        )
        for tensor in map(tensors.__getitem__, plan.program.assignment.storage)
        if tensor.name in gradients and types.reduced(tensor) != types.stored(tensor)
    }
    return math.fsum(cast_of_gradients(plan, gradients, cluster).values()), math.fsum(
        _streamed(home, cluster).values()
    )


def cast_of_gradients(
    plan: Scheduled, gradients: frozenset[str], cluster: Cluster
) -> dict[str, float]:
    """Seconds of casting the gradient of each parameter in a backward pass."""
    if not cluster.framework.habits.casts_gradients:
        return {}
    types = plan.schedule.types
    tensors = plan.program.graph.tensors
    mesh = plan.program.assignment.mesh.shape
    used: dict[str, float] = {}
    for name, layout in _places(plan):
        tensor = tensors[name]
        if name in gradients and types.reduced(tensor) != tensor.dtype:
            used[name] = max(
                used.get(name, 0.0),
                local_bytes(layout, tensor.own_bytes + types.reduced_bytes(tensor), mesh),
            )
    return _streamed(used, cluster)


def adding_of_gradients(
    plan: Scheduled, gradients: frozenset[str], cluster: Cluster
) -> dict[str, float]:
    """Return the seconds of adding a micro-batch's gradient of each parameter to earlier ones.

    They are added in the layout where they are summed.
    """
    program = plan.program
    types = plan.schedule.types
    mesh = plan.program.assignment.mesh.shape
    moved = ((step, plan.modes.get(index)) for index, step in enumerate(program.steps))
    once = {
        step.tensor: step.chain[-1]
        for step, mode in moved
        if isinstance(step, Redistribute) and mode is Mode.ONCE
    }
    trained = [tensor for tensor in program.graph.parameters if tensor.name in gradients]
    places = {
        tensor.name: once.get(tensor.name, program.assignment.storage[tensor.name])
        for tensor in trained
    }
    habits = cluster.framework.habits
    added = {tensor.name: int(added_bytes(tensor, types, habits)) for tensor in trained}
    nbytes = {name: local_bytes(places[name], size, mesh) for name, size in added.items() if size}
    return _streamed(nbytes, cluster)


def added_bytes(tensor: Tensor, types: Types, habits: Habits) -> float:
    """Return the bytes that move where a parameter's gradient is added to those before it."""
    if habits.fused_accumulation:
        return 0.0
    if habits.accumulation_bytes is not None:
        return habits.accumulation_bytes * tensor.size
    # Both are read, and the sum is written.
    summed = types.reduced_bytes(tensor)
    return 2 * summed + (summed if habits.casts_gradients else tensor.own_bytes)


def _streamed(nbytes: Mapping[str, float], cluster: Cluster) -> dict[str, float]:
    if not nbytes:
        return {}
    seconds = with_launch(
        0.0, memory_seconds(np.array(list(nbytes.values())), cluster.device), cluster.device
    )
    return dict(zip(nbytes, seconds.tolist(), strict=True))


def _places(plan: Scheduled) -> Iterator[tuple[str, Layout]]:
    """The used and stored layouts of parameters."""
    yield from plan.program.assignment.storage.items()
    for step in plan.program.steps:
        if (
            isinstance(step, Redistribute)
            and plan.program.graph.tensors[step.tensor].role is Role.PARAMETER
        ):
            yield step.tensor, step.chain[-1]
