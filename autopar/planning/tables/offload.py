"""Tables in which a parameter's optimizer state may be in host memory.

Every storage layout of a trained parameter becomes two choices with the same redistributions:

    device    u seconds                b bytes
    host      streamed(u) seconds      b - s bytes, and s in host memory

s: bytes of the optimizer state; streamed: see `costmodel/step/host_offload.py`. The choice of the
host always takes longer, so no solution without a memory limit contains it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopar.costmodel.step.host_offload import state_bytes, streamed_update
from autopar.costmodel.step.mesh_prices import optimizer_named, update_seconds
from autopar.ir import Tensor
from autopar.search import shared_map

from .tables import Choices, Floats, Tables


def offering_host(
    tables: Tables, *, room: float, only: bool = False, hosted: frozenset[str] | None = None
) -> Tables:
    """Tables with choices of host memory next to those of the device, or `only` these.

    `room`: bytes that the hosts hold in all. `hosted`: only these parameters have choices of host
    memory, and they have no others. Tables with such choices are returned unchanged.
    """
    if (
        not optimizer_named(tables.optimizer).streams
        or not tables.analysis.train
        or any(v.host is not None for v in tables.variables)
    ):
        return tables
    # If the hosted parameters are fixed, the search has nothing left to choose.
    only = only or hosted is not None
    known: dict[object, Choices] = {}
    offered: dict[int, Choices] = {}
    for place, variable in enumerate(tables.variables):
        if variable.what != "parameter":
            continue
        tensor = tables.analysis.graph.tensors[variable.name]
        if tensor.trainable and (hosted is None or variable.name in hosted):
            count = tables.counts.get(variable.name, 1)
            key = (tables.offered[place], tensor.shape, tensor.dtype, count)
            if key not in known:
                known[key] = _choices(tables, place, tensor, only=only)
            offered[place] = known[key]
    if not offered:
        return tables
    return _with_choices(tables, offered, doubled=not only, room=room)


def _with_choices(
    tables: Tables, offered: Mapping[int, Choices], *, doubled: bool, room: float
) -> Tables:
    """Return tables with other choices of some variables.

    `doubled`: each of these variables has every layout twice.
    """
    choices = tuple(offered.get(place, own) for place, own in enumerate(tables.offered))
    variables = tuple(
        replace(variable, rows=own.rows, host=own.host)
        for variable, own in zip(tables.variables, choices, strict=True)
    )
    edges: Mapping[tuple[int, int], Floats] = tables.graph.edges
    aside = tables.aside
    each = tables.each
    # The host's choice of a layout is redistributed as the device's is.
    if doubled:
        places = frozenset(offered)
        edges = _twice(edges, places)
        aside = _twice(aside, places)
        each = _twice(each, places)
    graph = replace(
        tables.graph,
        sizes=tuple(len(own.rows) for own in choices),
        unary=tuple(own.seconds for own in choices),
        edges=edges,
        memory=tuple(own.memory for own in choices),
        digits=tuple(own.digits for own in choices),
    )
    return replace(
        tables,
        graph=graph,
        variables=variables,
        offered=choices,
        aside=aside,
        each=each,
        host_room=room,
    )


def _choices(tables: Tables, place: int, tensor: Tensor, *, only: bool) -> Choices:
    """Return the choices of a parameter, which may represent several."""
    count = tables.counts.get(tensor.name, 1)
    own = tables.offered[place]
    cluster = tables.prices.cluster
    shards = tables.spaces[tensor.name].divisors()[own.rows]
    optimizer = tables.optimizer
    types = tables.types
    state = count * state_bytes(tensor, shards, optimizer, types)
    # The state passes to the device for its update, and back.
    longer = streamed_update(tensor, shards, optimizer, cluster, types) - update_seconds(
        tensor, shards, optimizer, cluster, types
    )
    seconds = own.seconds + count * longer
    # What the host holds no longer counts on the device.
    memory = own.memory - state
    if only:
        return Choices(rows=own.rows, seconds=seconds, memory=memory, digits=own.digits, host=state)
    return Choices(
        rows=np.concatenate((own.rows, own.rows)),
        seconds=np.concatenate((own.seconds, seconds)),
        memory=np.concatenate((own.memory, memory)),
        digits=np.concatenate((own.digits, own.digits)),
        host=np.concatenate((np.zeros(len(own.rows)), state)),
    )


def _beside_itself(axis: int, table: Floats) -> Floats:
    return np.concatenate([table, table], axis=axis)


def _twice(
    given: Mapping[tuple[int, int], Floats], offered: frozenset[int]
) -> dict[tuple[int, int], Floats]:
    """The edges; every layout of the parameters in `offered` occurs twice."""
    along = tuple(shared_map(functools.partial(_beside_itself, axis)) for axis in (0, 1))
    edges = dict(given)
    for (u, v), table in edges.items():
        once = along[0](table) if u in offered else table
        edges[u, v] = along[1](once) if v in offered else once
    return edges
