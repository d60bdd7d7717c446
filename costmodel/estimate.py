"""The predicted time and memory of a plan's program: what is priced is what is executed.

step    = forward + backward + update computation, plus every collective of the program, one after another
memory  = parameters + gradients + optimizer state + saved activations + the largest transient
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autopar.sharding.analysis import Analysis
from autopar.sharding.candidates import Strategies
from autopar.sharding.program import Collective, Compute, Program
from autopar.sharding.redistribution import local_bytes

from .memory import Memory, predicted_memory
from .operators import operator_seconds
from .pricing import MeshPrices, update_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of one step (or one inference) by part, and the memory of a device."""

    forward: float
    backward: float
    update: float
    communication: float
    memory: Memory

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward + self.update + self.communication


def collective_seconds(collective: Collective, prices: MeshPrices) -> float:
    """Seconds of one collective of a program."""
    return prices.seconds(collective.kind, collective.axis, collective.nbytes)


def estimate(program: Program, analysis: Analysis, prices: MeshPrices, *, optimizer: str) -> Estimate:
    """Price a program step by step."""
    known: dict[object, tuple[float, float]] = {}
    forward = backward = 0.0
    for step in program.steps:
        if isinstance(step, Compute) and step.operator.name not in analysis.cold:
            offer = analysis.offers[step.operator.name]
            key = (id(offer), tuple(option.name for option in step.decision.options))
            if key not in known:
                known[key] = _operator(step, analysis, prices)
            forward += known[key][0]
            backward += known[key][1]
    update = 0.0
    if analysis.train:
        for tensor in program.graph.parameters:
            shards = tensor.bytes // max(local_bytes(program.assignment.storage[tensor.name], tensor.bytes, prices.mesh.shape), 1)
            update += float(update_seconds(tensor, np.array([max(shards, 1)]), optimizer, prices.cluster)[0])
    seconds = math.fsum(collective_seconds(c, prices) for c in program.collectives())
    memory = predicted_memory(program, analysis, optimizer=optimizer)
    return Estimate(forward=forward, backward=backward, update=update, communication=seconds, memory=memory)


def _operator(step: Compute, analysis: Analysis, prices: MeshPrices) -> tuple[float, float]:
    offer = analysis.offers[step.operator.name]
    position = {option.name: i for i, option in enumerate(offer.options)}
    row = np.array([[position[option.name] for option in step.decision.options]], dtype=np.int64)
    strategies = Strategies(rule=offer.rule, options=offer.options, choices=row)
    mine = (*step.operator.inputs, *step.operator.outputs)
    theirs = (*offer.call.operator.inputs, *offer.call.operator.outputs)
    gradients = frozenset(other for name, other in zip(mine, theirs, strict=True) if name in analysis.gradients)
    forward, backward = operator_seconds(offer.call, strategies, prices.mesh.shape, prices.cluster, gradients)
    return float(forward[0]), float(backward[0])
