"""Bytes that segments hold for their backward pass, by the parameters that begin them.

The runtime begins a segment before the first reader of each unit of parameters, and a segment holds
its inputs until its backward pass is over. A parameter of more bytes than a unit may have is in one
by itself. So while the loss works backward, a value that no operator saves is there if such a
parameter is first read behind its maker, and no later than the value is:

    peak >= ... + bytes / d        where an operator takes more than a unit of its parameter

d: the devices of the mesh, over which a value is split at the most. Such values are the sums of a
residual stream, of which one crosses the products of each layer. Where several parameters would be
enough, each bears an equal share of the bytes. The segment of the loss also wants the parameter
that is read last before it; only where parameters are gathered for every pass is that not counted
with those that stay.

Parameters that are cast for their readers have units whatever is chosen; others are left out. So
are models with layers of experts, which move the beginnings of segments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.costmodel.memory.saved_values import (
    Share,
    facts_of,
    places_saved,
    roots_of,
    saved_values,
)
from autopar.ir import Tensor
from autopar.planning.space import Multiplicities
from autopar.planning.tables import Tables
from autopar.planning.tables.operators import share_bytes
from autopar.planning.tables.tables import Floats
from autopar.sharding.analysis import Analysis
from autopar.sharding.rules.experts import EXPERTS

from .last_backward import at_the_end


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossed:
    """A value that no operator saves, with its maker and its last reader.

    `inside`: the operators up to the last reader that are the only ones to read a parameter, each
    with the parameter.
    """

    name: str
    maker: str
    last: str
    inside: tuple[tuple[str, str], ...]


def with_held_inputs(tables: Tables, work: Multiplicities) -> Tables:
    """Return the tables of a training with what segments surely hold.

    It has no stages, and recomputes nothing.
    """
    often_of = work.counts.operators
    tensors = tables.analysis.graph.tensors
    composite = tables.prices.cluster.backend == "gloo"
    numbers = {v.name: n for n, v in enumerate(tables.variables) if v.what == "operator"}
    offered = list(tables.offered)
    for value in _crossed(tables.analysis, composite):
        # Of equal layers each has its own value, and its own parameters.
        often = {often_of.get(name, 1) for name in (value.maker, value.last)}
        large = [
            (reader, tensors[name])
            for reader, name in value.inside
            if reader in numbers and tables.types.casts(tensors[name])
            if tensors[name].bytes > tables.prices.unit_bytes
            if often == {often_of.get(reader, 1)}
        ]
        for reader, parameter in large:
            number = numbers[reader]
            begins = _taken(tables, number, parameter) > tables.prices.unit_bytes
            # One of them is enough, so each bears an equal share.
            share = tensors[value.name].bytes / tables.prices.mesh.devices / len(large)
            held = often_of.get(reader, 1) * share * begins
            offered[number] = replace(offered[number], memory=offered[number].memory + held)
    for reader, name in _wanted(tables.analysis, composite) if work.zero == 3 else ():
        if reader in numbers and tables.types.casts(tensors[name]):
            number = numbers[reader]
            taken = _taken(tables, number, tensors[name])
            offered[number] = replace(offered[number], memory=offered[number].memory + taken)
    graph = replace(tables.graph, memory=tuple(choices.memory for choices in offered))
    return replace(tables, graph=graph, offered=tuple(offered))


def _taken(tables: Tables, number: int, parameter: Tensor) -> Floats:
    """Return the bytes of a parameter that an operator takes on a device: array [choices]."""
    variable = tables.variables[number]
    strategies = tables.strategies[variable.name]
    inputs = tables.analysis.graph.operators[tables.analysis.readers[parameter.name][0][0]].inputs
    share = Share(
        output=False, position=inputs.index(parameter.name), nbytes=parameter.bytes / parameter.size
    )
    return share_bytes(strategies, tables.prices.mesh.shape, (share,))[variable.rows]


def _wanted(analysis: Analysis, composite: bool) -> tuple[tuple[str, str], ...]:
    """Return the operator that reads the last parameter up to the loss, with that parameter.

    No segment begins between both, so that its backward pass wants the parameter, too.
    """
    loss = _loss(analysis, composite)
    every = (analysis.readers.get(tensor.name, ()) for tensor in analysis.graph.parameters)
    last = max((n for readers in every for n, _ in readers if n <= loss), default=-1)
    name = _only_readers(analysis).get(last)
    weights = saved_values(analysis).weights
    return ((analysis.graph.operators[last].name, name),) if name in weights else ()


@functools.lru_cache(maxsize=16)
def _crossed(analysis: Analysis, composite: bool) -> tuple[Crossed, ...]:
    """Return the values that are read up to the loss, and that no operator saves."""
    operators = analysis.graph.operators
    if any(op.kind == EXPERTS for op in operators):
        return ()
    loss = _loss(analysis, composite)
    first = _only_readers(analysis)
    return tuple(
        Crossed(
            name=name,
            maker=operators[maker].name,
            last=operators[last].name,
            inside=tuple(
                (operators[number].name, first[number])
                for number in range(maker + 1, last + 1)
                if number in first
            ),
        )
        for name, maker, last in _unsaved(analysis, composite)
        if last <= loss
    )


def _loss(analysis: Analysis, composite: bool) -> int:
    """Return the number of the operator at the end of whose moments all is there (-1: none)."""
    ends = at_the_end(analysis, (), composite).passing
    operators = enumerate(analysis.graph.operators)
    return max((number for number, op in operators if op.name in ends), default=-1)


def _only_readers(analysis: Analysis) -> dict[int, str]:
    """Return the largest parameter that only one operator reads, by its number.

    Of several readers only one begins a unit.
    """
    largest: dict[int, Tensor] = {}
    for tensor in analysis.graph.parameters:
        readers = analysis.readers.get(tensor.name, ())
        if len(readers) == 1:
            number = readers[0][0]
            largest[number] = max(largest.get(number, tensor), tensor, key=lambda t: t.bytes)
    return {number: tensor.name for number, tensor in largest.items()}


def _unsaved(analysis: Analysis, composite: bool) -> Iterator[tuple[str, int, int]]:
    """Yield the values that no operator saves, with the numbers of makers and last readers."""
    facts = facts_of(analysis, composite=composite, counted=True)
    roots = roots_of(analysis, facts)
    saved = {name for places in places_saved(analysis, facts, {}).values() for *_, name in places}
    counted = {roots.get(name, name) for name in (*saved, *analysis.graph.outputs)}
    for number, op in enumerate(analysis.graph.operators):
        for name in op.outputs:
            readers = analysis.readers.get(name, ())
            if op.name not in analysis.cold and name not in counted | roots.keys() and readers:
                yield name, number, max(reader for reader, _ in readers)
