"""Host memory as a choice of the search: tables in which a parameter's optimizer state may be in host memory.

Every storage layout of a trained parameter becomes two choices with the same redistributions:

    device    u seconds                b bytes
    host      streamed(u) seconds      b - s bytes, and s in host memory

s: bytes of the optimizer state; streamed: see `costmodel/step/host.py`. The choice of the host always takes longer, so
no solution without a memory limit contains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.step.host import state_bytes, streamed_update
from autopar.costmodel.step.pricing import optimizer_named, update_seconds
from autopar.search.costgraph import shared_map

from ..ir import Tensor
from .tables import Floats, Tables, Variable

Choices = tuple[NDArray[np.int64], Floats, Floats, NDArray[np.integer], Floats]
"""Rows, seconds, bytes, digits, and bytes in host memory."""


def offering_host(tables: Tables, *, room: float, only: bool = False) -> Tables:
    """Tables with the choices of host memory beside those of the device, or `only` these; the hosts hold `room` bytes in all.

    Tables that have such choices already are returned as they are.
    """
    if optimizer_named(tables.optimizer).states == 0 or not tables.analysis.train or any(v.host is not None for v in tables.variables):
        return tables
    graph, tensors = tables.graph, tables.analysis.graph.tensors
    assert graph.memory is not None and graph.digits is not None
    known: dict[object, Choices] = {}
    offered: dict[int, Choices] = {}
    for place, variable in enumerate(tables.variables):
        if variable.what == "parameter" and tensors[variable.name].trainable:
            tensor, count = tensors[variable.name], tables.counts.get(variable.name, 1)
            key = (id(graph.unary[place]), id(graph.memory[place]), id(variable.rows), tensor.shape, tensor.dtype, count)
            if key not in known:
                known[key] = _choices(tables, place, tensor, count, only=only)
            offered[place] = known[key]
    if not offered:
        return tables
    found = tuple(
        offered.get(i, (v.rows, unary, memory, digits, None))
        for i, (v, unary, memory, digits) in enumerate(zip(tables.variables, graph.unary, graph.memory, graph.digits, strict=True))
    )
    variables = tuple(
        Variable(what=v.what, name=v.name, rows=rows, host=host) for v, (rows, _, _, _, host) in zip(tables.variables, found, strict=True)
    )
    edges, aside, each = (given if only else _twice(given, frozenset(offered)) for given in (graph.edges, tables.aside, tables.each))
    wider = replace(
        graph, sizes=tuple(len(v.rows) for v in variables), unary=tuple(f[1] for f in found), edges=edges,
        memory=tuple(f[2] for f in found), digits=tuple(f[3] for f in found),
    )  # fmt: skip
    return replace(tables, graph=wider, variables=variables, aside=aside, each=each, host_room=room)


def _choices(tables: Tables, place: int, tensor: Tensor, count: int, *, only: bool) -> Choices:
    """The choices of a parameter that represents `count` parameters."""
    graph, rows, cluster = tables.graph, tables.variables[place].rows, tables.prices.cluster
    assert graph.memory is not None and graph.digits is not None
    shards = tables.spaces[tensor.name].divisors()[rows]
    optimizer, types = tables.optimizer, tables.types
    state = count * state_bytes(tensor, shards, optimizer, types)
    longer = streamed_update(tensor, shards, optimizer, cluster, types) - update_seconds(tensor, shards, optimizer, cluster, types)
    unary, memory, digits = graph.unary[place] + count * longer, graph.memory[place] - state, graph.digits[place]
    if only:
        return rows, unary, memory, digits, state
    pairs = ((rows, rows), (graph.unary[place], unary), (graph.memory[place], memory), (digits, digits), (np.zeros(len(rows)), state))
    both = tuple(np.concatenate(pair) for pair in pairs)
    return both[0], both[1], both[2], both[3], both[4]


def _twice(given: Mapping[tuple[int, int], Floats], offered: frozenset[int]) -> dict[tuple[int, int], Floats]:
    """The edges; every layout of the parameters in `offered` occurs twice."""
    along = tuple(shared_map(lambda table, axis=axis: np.concatenate([table, table], axis=axis)) for axis in (0, 1))  # type: ignore[misc]
    edges = dict(given)
    for (u, v), table in edges.items():
        once = along[0](table) if u in offered else table
        edges[u, v] = along[1](once) if v in offered else once
    return edges
