"""The bytes that every operator of a program keeps, and those that it hands on.

saved    what a micro-batch keeps from its forward to its backward pass
excess   what is alive besides while the operator is at work
stored   copies of gathered parameters, which stay from micro-batch to micro-batch
handed   values that are made before an operator and read from it on
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.memory.autograd_liveness import Autograd, live_bytes
from autopar.costmodel.memory.recompute import recompute_by
from autopar.costmodel.memory.saved_values import facts_of
from autopar.ir import Role
from autopar.sharding.layout import Kind
from autopar.sharding.program import Redistribute, inputs_read, only_casts
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.rules import without_parameters

from .costed_program import CostedProgram

Floats = NDArray[np.float64]


def saved_and_excess(costed: CostedProgram) -> tuple[Floats, Floats]:
    """Return the bytes that operators save, and those alive besides: arrays [operators].

    Inputs of the model are saved, too, but they are no part of what is alive in a pass.
    """
    count = len(costed.graph.operators)
    saved = np.zeros(count)
    excess = np.zeros(count)
    framework = costed.prices.cluster.framework
    habits = framework.habits
    live = live_bytes(
        costed.program,
        facts_of(costed.analysis, framework.saving),
        Autograd(
            train=costed.analysis.train,
            recompute=recompute_by(habits, costed.schedule.recompute, costed.analysis),
            accumulating=True,
            regather=habits.regather,
            fused=habits.fused_accumulation,
            units=True,
            types=costed.types,
        ),
    )
    for name, size in live.saved_of.items():
        saved[costed.places.get(name, 0)] += size
    # A stage adds up what its own operators saved, so the excess is beyond that sum.
    so_far = np.cumsum(saved)
    for moment, name in enumerate(live.moments):
        if name in costed.places:
            index = costed.places[name]
            alive = live.activations[moment] + live.gradients[moment] + live.passing[moment]
            excess[index] = max(float(excess[index]), alive - float(so_far[index]))
    _add_inputs(costed, saved)
    return saved, excess


def _add_inputs(costed: CostedProgram, saved: Floats) -> None:
    """Add the parts of the model's inputs to what the first operator that reads them saves."""
    unread = set(inputs_read(costed.program))
    decisions = costed.program.assignment.decisions
    for index, op in enumerate(costed.graph.operators):
        if op.name in costed.analysis.cold:
            continue
        for name, layout in zip(op.inputs, decisions[op.name].inputs, strict=True):
            # Later readers of the same part find it there.
            if (name, layout) in unread:
                unread.remove((name, layout))
                saved[index] += local_bytes(layout, costed.graph.tensors[name].bytes, costed.mesh)


def add_copies(costed: CostedProgram, stored: Floats) -> None:
    """Add the copies of parameters that stay for the step to what operators store.

    These are parameters gathered once a step, with their gradients if these are added up whole, and
    parameters that are only cast. The shards of whole gradients, which are counted with storage,
    come one unit at a time as these go: only one of both is there.
    """
    schedule = costed.schedule
    with_gradients = schedule.accumulated == "whole" and schedule.micro_batches > 1
    summed: set[str] = set()
    for step in costed.program.steps:
        if not isinstance(step, Redistribute):
            continue
        tensor = costed.graph.tensors[step.tensor]
        if tensor.role is not Role.PARAMETER:
            continue
        index = costed.first[step.tensor]
        used = step.chain[-1]
        before = local_bytes(step.chain[0], tensor.bytes, costed.mesh)
        after = local_bytes(used, tensor.bytes, costed.mesh)
        if only_casts(step):
            stored[index] += after
        elif after > before and schedule.gathered == "per_step":
            stored[index] += after
            if with_gradients and step.gradient:
                nbytes = costed.types.reduced_bytes(tensor)
                stored[index] += local_bytes(used, nbytes, costed.mesh)
                if step.tensor not in summed:
                    stored[index] -= local_bytes(step.chain[0], nbytes, costed.mesh)
                summed.add(step.tensor)


def handed_bytes(costed: CostedProgram) -> Floats:
    """Return the bytes that a stage receives if it begins at an operator: array [operators + 1].

    Values to which no parameter leads are not handed on, because each stage computes them itself.
    Of a whole value each device sends a share, where the framework scatters messages.
    """
    scatters = costed.prices.cluster.framework.habits.scatter_sends
    devices = costed.prices.mesh.devices
    operators = costed.graph.operators
    own = {op.name for op in without_parameters(costed.graph)}
    last: dict[str, int] = {}
    for index, op in enumerate(operators):
        if op.name not in costed.analysis.cold:
            last.update(dict.fromkeys(op.inputs, index))
    change = np.zeros(len(operators) + 2)
    for index, op in enumerate(operators):
        # A mask, for instance, is cheaper to make than to send.
        if op.name in own:
            continue
        decision = costed.program.assignment.decisions[op.name]
        for name, layout in zip(op.outputs, decision.outputs, strict=True):
            if name in last:
                splits = [
                    costed.mesh[axis]
                    for axis, placement in enumerate(layout)
                    if placement.kind is Kind.SPLIT
                ]
                shares = devices if scatters else np.prod(splits, initial=1.0)
                size = costed.graph.tensors[name].bytes / shares
                # It is handed on from the operator behind its maker to its last reader.
                change[index + 1] += size
                change[last[name] + 1] -= size
    return np.maximum(np.cumsum(change)[: len(operators) + 1], 0.0)
