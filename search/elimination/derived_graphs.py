"""Cost graphs made from another: infinities softened, choices fixed or cut, variables split.

Tables that are equal in the given graph are one array in the result, too: the search recognises
equal layers by that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ..costgraph import CostGraph, Edge
from ..tables import Indices, Table, shared_map


def soften(graph: CostGraph) -> CostGraph:
    """Return the graph with a finite penalty in place of infinity.

    The penalty is above any finite cost, so that descent can leave forbidden assignments.
    """
    tables = [*graph.unary, *graph.edges.values()]
    # Twice the sum of all largest entries: more than any two finite assignments can differ.
    spread = shared_map(
        lambda table: np.abs(table[np.isfinite(table)]).max(initial=0.0, keepdims=True)
    )
    penalty = 1.0 + 2.0 * math.fsum(float(spread(table).max()) for table in tables)
    fill = shared_map(
        lambda table: np.where(np.isinf(table), penalty, table) if np.isinf(table).any() else table
    )
    return replace(
        graph,
        derived=True,
        unary=tuple(fill(t) for t in graph.unary),
        edges={edge: fill(t) for edge, t in graph.edges.items()},
    )


def condition(graph: CostGraph, settled: Mapping[int, int]) -> CostGraph:
    """Return the graph in which each variable of `settled` has this single choice."""
    picks = {v: slice(choice, choice + 1) for v, choice in settled.items()}
    whole = slice(None)

    def rows(tables: Sequence[Table]) -> tuple[Table, ...]:
        return tuple(table[picks[v]] if v in picks else table for v, table in enumerate(tables))

    edges = {
        (u, v): table[picks.get(u, whole), picks.get(v, whole)]
        if u in picks or v in picks
        else table
        for (u, v), table in graph.edges.items()
    }
    sizes = tuple(1 if v in picks else size for v, size in enumerate(graph.sizes))
    return CostGraph(
        derived=True,
        sizes=sizes,
        unary=rows(graph.unary),
        edges=edges,
        memory=None if graph.memory is None else rows(graph.memory),
    )


def restrict(graph: CostGraph, remaining: Sequence[Indices]) -> CostGraph:
    """Return the graph with only the remaining choices of each variable.

    Equal cuts of a shared table stay shared.
    """
    # Variables with the same remaining choices have one number, the first variable's: with the
    # table's number it names a cut, so that equal layers share their cuts.
    cuts: dict[tuple[int, ...], Table] = {}
    alike: dict[tuple[int, bytes], int] = {}
    names = [
        alike.setdefault((size, indices.tobytes()), v)
        for v, (size, indices) in enumerate(zip(graph.sizes, remaining, strict=True))
    ]

    numbers = graph.numbers
    distinct = numbers.distinct

    def row(table: int, v: int) -> Table:
        key = (table, names[v])
        if key not in cuts:
            cuts[key] = distinct[table][remaining[v]]
        return cuts[key]

    def cut(table: int, u: int, v: int) -> Table:
        key = (table, names[u], names[v])
        if key not in cuts:
            cuts[key] = distinct[table][np.ix_(remaining[u], remaining[v])]
        return cuts[key]

    return CostGraph(
        derived=True,
        sizes=tuple(len(indices) for indices in remaining),
        unary=tuple(row(table, v) for v, table in enumerate(numbers.unary)),
        edges={
            (u, v): cut(table, u, v)
            for (u, v), table in zip(graph.edges, numbers.edges, strict=True)
        },
        memory=None
        if numbers.memory is None
        else tuple(row(table, v) for v, table in enumerate(numbers.memory)),
    )


def _share(table: Table, parts: int) -> Table:
    return table / parts


def split(graph: CostGraph, fixed: Sequence[int]) -> tuple[CostGraph, list[int]]:
    """Return the relaxed graph and the origin of each of its variables.

    A variable's first copy keeps its number, further copies come last.
    """
    degree = dict.fromkeys(fixed, 0)
    for edge in graph.edges:
        for v in edge:
            if v in degree:
                degree[v] += 1
    shares = {k: shared_map(partial(_share, parts=max(k, 1))) for k in set(degree.values())}
    transposed = shared_map(lambda table: np.ascontiguousarray(table.T))
    sizes = list(graph.sizes)
    origins = list(range(len(graph.sizes)))
    used: set[int] = set()
    edges: dict[Edge, Table] = {}
    # In the order of the edges' names, so that the copies' numbers are the same in every run.
    for edge in sorted(graph.edges):
        ends = []
        for v in edge:
            if v in used:
                ends.append(len(sizes))
                sizes.append(graph.sizes[v])
                origins.append(v)
            else:
                ends.append(v)
                used.update({v} & degree.keys())
        table = graph.edges[edge]
        edges[min(ends), max(ends)] = table if ends[0] < ends[1] else transposed(table)

    def rows(tables: Sequence[Table]) -> tuple[Table, ...]:
        return tuple(shares[degree[v]](tables[v]) if v in degree else tables[v] for v in origins)

    memory = None if graph.memory is None else rows(graph.memory)
    return CostGraph(
        derived=True, sizes=tuple(sizes), unary=rows(graph.unary), edges=edges, memory=memory
    ), origins
