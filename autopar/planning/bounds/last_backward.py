"""Bytes that a device surely holds as the last backward pass of a step begins, by its choices.

    peak >= stored + gradients + saved + n outputs + passing(o)

`o` is one of the first operators to which the gradient comes; of a language model it is the loss.
While it works backward in the last of n micro-batches, all is there that this micro-batch saved for
operators to which the gradient comes through `o`. So are the gradients of the micro-batches before
it (one micro-batch has none), and the outputs of all n, which are handed over at the end of the
step; one that is saved as well counts n - 1 times. `passing(o)`: the temporaries of `o`, and the
gradients of its inputs, which it makes while it reads what it saved.

Every term is of one variable's choice, so that tables can have it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from autopar.costmodel.memory.saved_values import (
    Facts,
    Share,
    facts_of,
    places_saved,
    roots_of,
    saved_values,
)
from autopar.ir import Operator, Role, Tensor
from autopar.planning.model.counts import Segments
from autopar.planning.space import Multiplicities
from autopar.planning.tables import Tables
from autopar.planning.tables.operators import share_bytes
from autopar.planning.tables.tables import Floats, Ints
from autopar.sharding.analysis import Analysis


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The bytes that are there beside those that tables count.

    `passing`: by the name of `o`, the shares of its inputs and outputs that it makes ({}: there is
    no such operator). `read`: operators that may have read what they saved. `outputs`: how many
    micro-batches hold each output, less the number of all.
    """

    passing: Mapping[str, tuple[Share, ...]]
    read: frozenset[str]
    outputs: Mapping[str, int]


def at_once(tables: Tables, segments: Segments, outputs: int) -> Tables:
    """Return the tables of a training with the bytes that are there beside those that they count.

    `segments`: the recomputed operators. `outputs`: of so many micro-batches they are held.
    """
    composite = tables.prices.cluster.backend == "gloo"
    beside = at_the_end(tables.analysis, segments, composite)
    memory = dict(_counted(tables, beside, outputs))
    offered = tuple(
        replace(choices, memory=memory[number]) if number in memory else choices
        for number, choices in enumerate(tables.offered)
    )
    graph = replace(tables.graph, memory=tuple(choices.memory for choices in offered))
    return replace(tables, graph=graph, offered=offered)


def without_gradients(tables: Tables) -> Tables:
    """Tables whose parameters take no memory for gradients, as before those of one micro-batch."""
    return tables.lighter(partial(_gradient, tables))


def counted_once(tables: Tables, work: Multiplicities) -> Tables:
    """Tables in which no gradient counts twice.

    One that is added up whole counts with the operators that save its parameter. Its shard, which
    counts with storage, is made as the whole one goes.
    """
    if work.zero != 1 or not work.accumulating:
        return tables
    saved = saved_values(tables.analysis, work.segments).weights

    def spared(tensor: Tensor, shards: Ints) -> Floats:
        return _gradient(tables, tensor, shards) * (tensor.name in saved)

    return tables.lighter(spared)


def _gradient(tables: Tables, tensor: Tensor, shards: Ints) -> Floats:
    """Return what `storage_bytes` has for a gradient, as it is stored or as it is reduced."""
    types = tables.types
    return max(types.stored_bytes(tensor), types.reduced_bytes(tensor)) / shards


def _counted(tables: Tables, beside: Beside, outputs: int) -> Iterator[tuple[int, Floats]]:
    """Yield the variables of which other bytes count than in tables, with those of each choice."""
    mesh = tables.prices.mesh.shape
    for number, variable in enumerate(tables.variables):
        memory = tables.offered[number].memory
        name = variable.name
        passing = [member for member in variable.members if member in beside.passing]
        # The others of a region may be there no longer either.
        read = not beside.read.isdisjoint(variable.members)
        if read or passing:
            made = [
                share_bytes(tables.strategies[member], mesh, beside.passing[member])[variable.rows]
                for member in passing
            ]
            yield number, sum(made, np.zeros_like(memory) if read else memory)
        elif variable.what == "output" and name in beside.outputs:
            often = max(outputs + beside.outputs[name], 0)
            shards = tables.spaces[name].divisors()[variable.rows]
            yield number, memory + often * tables.analysis.graph.tensors[name].bytes / shards


@lru_cache(maxsize=16)
def at_the_end(analysis: Analysis, segments: Segments, composite: bool) -> Beside:
    """Return what is beside the saved values of an analysed model."""
    facts = facts_of(analysis, composite=composite, counted=True)
    roots = roots_of(analysis, facts)
    segment_of = {name: number for number, segment in enumerate(segments) for name in segment}
    saved = {
        roots.get(name, name)
        for places in places_saved(analysis, facts, segment_of).values()
        for _, _, name in places
    }
    made = {name for op in analysis.warm for name in op.outputs}
    outputs = {
        name: -1 if name in saved else 0
        for name in analysis.graph.outputs
        # A view is the memory of something else.
        if name in made and name not in roots and name != analysis.graph.loss
    }
    return replace(_first(analysis, segments, facts), outputs=outputs)


def _first(analysis: Analysis, segments: Segments, facts: Mapping[str, Facts]) -> Beside:
    """Return the operator of the first ones that makes most, less what others have read before."""
    shares = saved_values(analysis, segments).shares
    recomputed = {name for segment in segments for name in segment}
    keepers = [op for op in analysis.warm if op.name in shares]
    best = Beside(passing={}, read=frozenset(), outputs={})
    most = 0.0
    read: dict[str, float] = {}
    while keepers:
        op = keepers.pop()
        made = _made(analysis, op, facts[op.name])
        more = _whole_bytes(analysis, op, made) - math.fsum(read.values())
        if more > most and op.name not in recomputed:
            behind = _behind(analysis, op)
            if all(other.name in behind for other in keepers):
                most = more
                best = replace(best, passing={op.name: made}, read=frozenset(read))
        read[op.name] = _whole_bytes(analysis, op, shares[op.name])
    return best


def _whole_bytes(analysis: Analysis, op: Operator, shares: Iterable[Share]) -> float:
    """Return about the bytes of shares on one device."""
    tensors = analysis.graph.tensors
    return math.fsum(
        share.nbytes * tensors[(op.outputs if share.output else op.inputs)[share.position]].size
        for share in shares
    )


def _behind(analysis: Analysis, last: Operator) -> set[str]:
    """Return an operator and those to which the gradient comes through it, by name."""
    behind = {last.name}
    wanted = {name for name in last.inputs if name in analysis.gradients}
    for op in reversed(analysis.warm):
        if not wanted.isdisjoint(op.outputs):
            behind.add(op.name)
            wanted.update(name for name in op.inputs if name in analysis.gradients)
    return behind


def _made(analysis: Analysis, op: Operator, facts: Facts) -> tuple[Share, ...]:
    """Return the shares of what an operator makes in its backward pass."""
    temporaries = [
        Share(output=one.output, position=one.position, nbytes=one.nbytes, made=one)
        for one in facts.scratch
    ]
    gradients = []
    for position, passed_on in facts.flows:
        tensor = analysis.graph.tensors[op.inputs[position]]
        # The gradient of a parameter may travel in another type.
        if not passed_on and tensor.role is not Role.PARAMETER:
            nbytes = tensor.bytes / max(tensor.size, 1)
            gradients.append(Share(output=False, position=position, nbytes=nbytes))
    return (*temporaries, *gradients)
