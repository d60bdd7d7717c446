"""The predicted time and memory of a plan's program: what is priced is what is executed.

step    = forward + backward + update computation, plus every collective of the program, one after another
memory  = parameters + gradients + optimizer state + saved activations + the largest transient
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autopar.ir import Graph, Operator, Role
from autopar.sharding.analysis import Analysis
from autopar.sharding.candidates import Strategies
from autopar.sharding.layout import Layout
from autopar.sharding.program import Collective, Compute, Program, Redistribute
from autopar.sharding.redistribution import changed_axis, local_bytes, transfers
from autopar.sharding.rules import RULES

from .kept import kept_places
from .pricing import MeshPrices, operator_seconds, optimizer_named, update_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device, part by part."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    transient: float

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient


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


def predicted_memory(program: Program, analysis: Analysis, *, optimizer: str) -> Memory:
    """Bytes of one device: what is stored, what autograd keeps, and the largest set of tensors alive besides."""
    graph, mesh = program.graph, program.assignment.mesh.shape
    stored = {t.name: local_bytes(program.assignment.storage[t.name], t.bytes, mesh) for t in graph.parameters}
    trained = sum(stored[t.name] for t in graph.parameters if t.trainable) if analysis.train else 0
    values = sum(stored.values()) + sum(t.bytes for t in graph.tensors.values() if t.role in (Role.CONSTANT, Role.INPUT))
    saved = _saved_values(program, analysis)
    activations = sum(local_bytes(layout, graph.tensors[name].bytes, mesh) for name, layout in saved)
    return Memory(
        parameters=float(values),
        gradients=float(trained),
        optimizer=float(trained * optimizer_named(optimizer).states),
        activations=float(activations),
        transient=float(_transient(program, mesh)),
    )


Place = tuple[str, Layout]


def _saved_values(program: Program, analysis: Analysis) -> set[Place]:
    """The values that autograd keeps from forward to backward, each memory counted once."""
    roots: dict[Place, Place] = {}
    saved: set[Place] = set()
    stored = {(name, layout) for name, layout in program.assignment.storage.items()}

    def root(place: Place) -> Place:
        return roots.get(place, place)

    for step in program.steps:
        if isinstance(step, Redistribute):
            if not _moves(step, program.assignment.mesh.shape):
                roots[step.tensor, step.chain[-1]] = root((step.tensor, step.chain[0]))
            continue
        entry = RULES.get(step.operator.kind)
        inputs = list(zip(step.operator.inputs, step.decision.inputs, strict=True))
        outputs = list(zip(step.operator.outputs, step.decision.outputs, strict=True))
        if entry is None or step.operator.name in analysis.cold:
            continue
        if entry.view and inputs:
            roots.update({place: root(inputs[0]) for place in outputs})
        elif any(name in analysis.gradients for name, _ in outputs):
            saved |= {root((outputs if output else inputs)[i]) for output, i in kept_places(step.operator)}
    return saved - stored


def _moves(step: Redistribute, mesh: tuple[int, ...]) -> bool:
    """Whether a redistribution makes new memory: it communicates, or slices (a view that keeps its source alive does not)."""
    for before, after in zip(step.chain, step.chain[1:], strict=False):
        axis = changed_axis(before, after)
        if transfers(before[axis], after[axis], mesh[axis])[0] is not None or after[axis].kind.value == "P":
            return True
    return False


def _transient(program: Program, mesh: tuple[int, ...]) -> int:
    """The largest inputs and outputs of one operator, or the largest redistribution, with its gradient."""
    graph: Graph = program.graph
    largest = 0
    for step in program.steps:
        if isinstance(step, Compute):
            operator: Operator = step.operator
            places = [*zip(operator.inputs, step.decision.inputs, strict=True), *zip(operator.outputs, step.decision.outputs, strict=True)]
            size = sum(
                local_bytes(layout, graph.tensors[name].bytes, mesh)
                for name, layout in places
                if graph.tensors[name].role is not Role.PARAMETER
            )
        else:
            size = sum(local_bytes(layout, graph.tensors[step.tensor].bytes, mesh) for layout in (step.chain[0], step.chain[-1]))
        largest = max(largest, size)
    return largest
