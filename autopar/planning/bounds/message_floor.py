"""Seconds of messages between neighbouring stages, for any cuts and strategies.

With v chunks a stage, a micro-batch goes around all p stages v - 1 times before its last chunk, and
its gradients do so on the way back. A path that goes with it has the messages of these rounds, and
of its ways down and up (see `mixed_paths`). All messages from a stage to the next one take as long
as that of its first chunk.

Chunk s ends at some operator. What is read from there on, and was made before, is handed on, and no
layout splits a value over more than the d devices of a mesh:

    bytes handed on  >=  min over operators of  bytes of all such values / d

At the ends of a model there may be less to hand on. There are s chunks before the first cut of
stage s, and p v - s - 2 behind it, that hold work: a model is not cut twice without work between.
Operators between equal layers, of which only the first and the last are looked at, count as many.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from autopar.planning.model import FoldedModel
from autopar.planning.space import Candidate
from autopar.planning.stages.stage import Place, message_seconds
from autopar.sharding.analysis import Analysis
from autopar.sharding.rules import without_parameters

Floats = NDArray[np.float64]


def message_floor(folded: FoldedModel, candidate: Candidate, chunks: int) -> list[float]:
    """Return the least seconds of a message from each stage of several chunks to the next one."""
    stages = candidate.stages
    analysis = folded.analysis(short=True, micro_batches=candidate.micro_batches)
    several = frozenset(name for name, often in folded.counts.operators.items() if often > 1)
    devices = candidate.mesh.devices
    handed = _least_handed(analysis, several, stages, chunks) / devices
    places = [
        Place(cluster=candidate.cluster, start=stage * devices, count=devices)
        for stage in range(stages)
    ]
    return message_seconds(places, handed.tolist())


@functools.lru_cache(maxsize=256)
def _least_handed(analysis: Analysis, several: frozenset[str], stages: int, chunks: int) -> Floats:
    """Return the least bytes that the first chunk of each stage hands on, of all devices together.

    `several`: the operators that stand for several ones.
    """
    operators = analysis.graph.operators
    handed = _handed(analysis)
    working = np.array([op.name not in analysis.cold for op in operators])
    # A parameter that nothing reads is stored with the first operator.
    working[0] = True
    before = np.concatenate(([0], np.cumsum(working)))
    behind = before[-1] - before
    folds = [number for number, op in enumerate(operators) if op.name in several]
    place = np.arange(len(operators) + 1)
    # What is before equal layers, or behind them, is there as it is in the whole model.
    first = place <= min(folds, default=len(operators))
    last = place > max(folds, default=-1)
    least = np.zeros(stages)
    for stage in range(stages):
        few = first & (before < stage) | last & (behind < stages * chunks - stage - 2)
        least[stage] = np.where(few, np.inf, handed)[1:-1].min(initial=np.inf)
    # Where no cut is left there is no such pipeline.
    return np.where(np.isfinite(least), least, 0.0)


def _handed(analysis: Analysis) -> Floats:
    """Return the bytes of the values made before an operator and read from it on, for all of them.

    What no parameter leads to is made by each stage itself.
    """
    graph = analysis.graph
    own = {op.name for op in without_parameters(graph)}
    last: dict[str, int] = {}
    for number, op in enumerate(graph.operators):
        if op.name not in analysis.cold:
            last.update(dict.fromkeys(op.inputs, number))
    change = np.zeros(len(graph.operators) + 2)
    for number, op in enumerate(graph.operators):
        if op.name in own:
            continue
        for name in op.outputs:
            if name in last:
                change[number + 1] += graph.tensors[name].bytes
                change[last[name] + 1] -= graph.tensors[name].bytes
    return np.cumsum(change)[:-1]
