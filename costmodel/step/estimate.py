"""The predicted time and memory of a plan's program: the priced collectives are the executed ones.

step    = forward + backward + update computation + every collective of the program - seconds hidden
        by the timeline
memory  = parameters + gradients + optimizer state + saved activations + the largest transient
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.costmodel.device.operator_seconds import operator_parts
from autopar.costmodel.memory.peak import Memory, predicted_memory
from autopar.order.scheduled import Scheduled, scheduled
from autopar.sharding.analysis import Analysis
from autopar.sharding.program import Compute, Program
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.schedule import PLAIN, Schedule
from autopar.sharding.strategies import Strategies

from .covered import SLOWDOWN, Seconds
from .host_offload import state_bytes, stream_seconds
from .mesh_prices import MeshPrices, optimizer_of, update_seconds
from .shared_cores import hidden_messages
from .timeline import Overlap, Timeline, step_timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of one step (or one inference) by part, and the memory of a device.

    `communication`: of all collectives; `overlapped` seconds of them are hidden under computation.
    `streamed`: seconds of the update for moving optimizer state to host memory and back.
    """

    forward: float
    backward: float
    update: float
    communication: float
    overlapped: float
    memory: Memory
    streamed: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward + self.update + self.communication - self.overlapped


def estimate(
    program: Program | Scheduled,
    analysis: Analysis,
    prices: MeshPrices,
    *,
    optimizer: str,
    schedule: Schedule = PLAIN,
    memory: Memory | None = None,
) -> Estimate:
    """Price a program by its timeline.

    With micro-batches, program and analysis are those of one of them. `memory`: of a device, if it
    is known already.
    """
    plan = scheduled(program, schedule) if isinstance(program, Program) else program
    # Gloo's devices are CPUs, whose kernels are composed of smaller ones.
    memory = memory or predicted_memory(
        plan,
        analysis,
        optimizer=optimizer,
        composite=prices.cluster.backend == "gloo",
        framework=prices.cluster.framework,
    )
    played = timeline(plan, analysis, prices, optimizer=optimizer)
    return estimate_of(plan, prices, optimizer, played, memory)


def estimate_of(
    plan: Scheduled, prices: MeshPrices, optimizer: str, played: Timeline, memory: Memory
) -> Estimate:
    """Return the estimate of a program whose timeline and memory are known."""
    return Estimate(
        forward=played.forward,
        backward=played.backward,
        update=played.update,
        communication=played.communication,
        overlapped=played.hidden,
        memory=memory,
        streamed=_streamed(plan, prices, optimizer),
    )


def timeline(
    program: Program | Scheduled,
    analysis: Analysis,
    prices: MeshPrices,
    *,
    optimizer: str,
    overlap: Overlap | None = None,
    schedule: Schedule = PLAIN,
) -> Timeline:
    """Return a step's timeline under the program's own schedule or `schedule`.

    By default it has the runtime's overlaps.
    """
    plan = scheduled(program, schedule) if isinstance(program, Program) else program
    gathers, gradients = hidden_messages(
        prices.cluster, per_pass=plan.schedule.gathered == "per_pass"
    )
    habits = overlap or Overlap(
        gradients=gradients, prefetch=gathers, slowdown=SLOWDOWN[prices.cluster.backend]
    )
    update = _update(plan, prices, optimizer) if analysis.train else 0.0
    seconds = seconds_of_steps(analysis, prices)
    return step_timeline(plan, prices, seconds, update=update, overlap=habits)


def seconds_of_steps(analysis: Analysis, prices: MeshPrices) -> Callable[[Compute], Seconds]:
    """Return the function that gives the seconds of an operator of a program."""
    known: dict[object, Seconds] = {}

    def seconds(step: Compute) -> Seconds:
        if step.operator.name in analysis.cold:
            return Seconds(0.0, 0.0)
        # Equal operators share one offer, so those that are decided alike are priced once.
        key = (
            analysis.offers[step.operator.name].call.operator.name,
            tuple(option.name for option in step.decision.options),
        )
        if key not in known:
            known[key] = step_seconds(step, analysis, prices)
        return known[key]

    return seconds


def _streamed(plan: Scheduled, prices: MeshPrices, optimizer: str) -> float:
    """Seconds that optimizer state in host memory adds to the update."""
    host = plan.program.assignment.host
    return (
        _update(plan, prices, optimizer) - _update(plan, prices, optimizer, streams=False)
        if host
        else 0.0
    )


def _update(plan: Scheduled, prices: MeshPrices, optimizer: str, *, streams: bool = True) -> float:
    """Return the seconds of the optimizer over all stored shards.

    Parameters with state on the host are updated in sequence.
    """
    program = plan.program
    types = plan.schedule.types
    known: dict[tuple[int, int, str, bool, str], tuple[float, float]] = {}
    total = 0.0
    streamed: list[tuple[float, float]] = []
    for tensor in program.graph.parameters:
        layout = program.assignment.storage[tensor.name]
        stored = max(local_bytes(layout, tensor.own_bytes, prices.mesh.shape), 1)
        method = optimizer_of(tensor, optimizer, program.assignment.matrices)
        # Equal parameters of all layers are priced once.
        key = (tensor.own_bytes, stored, tensor.dtype, tensor.trainable, method)
        if key not in known:
            shards = np.array([max(tensor.own_bytes // stored, 1)])
            own = update_seconds(tensor, shards, method, prices.cluster, types)
            size = state_bytes(tensor, shards, method, types)
            known[key] = float(own[0]), float(size[0])
        if streams and tensor.name in program.assignment.host:
            streamed.append(known[key])
        else:
            total += known[key][0]
    return total + stream_seconds(
        [own for own, _ in streamed], [size for _, size in streamed], prices.cluster.device
    )


def step_seconds(step: Compute, analysis: Analysis, prices: MeshPrices) -> Seconds:
    """Return the seconds of an operator as it was decided."""
    offer = analysis.offers[step.operator.name]
    # Operators of equal signature have one offer, in all programs of a mesh.
    key = (offer, tuple(option.name for option in step.decision.options))
    if key not in prices.operators:
        choice = np.arange(len(step.decision.options))[None, :]
        strategies = Strategies(rule=offer.rule, options=step.decision.options, choices=choice)
        gradients = analysis.as_offered(step.operator, analysis.gradients)
        parts = operator_parts(offer.call, strategies, prices.mesh.shape, prices.cluster, gradients)
        prices.operators[key] = (
            float(parts.forward[0]),
            float(parts.backward[0]),
            float(parts.weight[0]),
        )
    return Seconds(*prices.operators[key])
