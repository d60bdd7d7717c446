"""The units of a model that cuts between pipeline stages divide, such as its layers, at prices of
seconds and bytes.

    price = w seconds + q_stored stored + q_saved saved

A stage stores bytes once, and saves them for each micro-batch in flight, so that each has a price
of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np

from autopar.planning.model.counts import Counts
from autopar.planning.tables import Tables
from autopar.planning.tables.tables import Floats
from autopar.search import Bounded, CostGraph, DualFunction

BLOCKS = 8
"""The most parts of a unit between which stages are thought to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The weight of a second, and the prices of a byte that is stored or saved once."""

    second: float
    stored: float
    saved: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to run the whole model: seconds of a pass, and bytes that it stores and saves."""

    seconds: float
    stored: float
    saved: float


class Piece:
    """Variables of a model that run together, with bytes that they store and save.

    `graph`: their seconds, without memory.
    """

    def __init__(
        self, graph: CostGraph, stored: tuple[Floats, ...], saved: tuple[Floats, ...]
    ) -> None:
        self.graph = graph
        self.stored = stored
        self.saved = saved
        self._solvers: dict[float, DualFunction] = {}

    def part(self, members: Sequence[int]) -> Piece:
        """Return some of the variables, without the edges to others."""
        return Piece(
            graph=_part(self.graph, members),
            stored=tuple(self.stored[v] for v in members),
            saved=tuple(self.saved[v] for v in members),
        )

    def least(self, prices: Prices) -> Bounded:
        """Return the least of seconds and bytes at their prices, as multiples of a second's."""
        # With the weight of a second taken out, one solver serves all stages of as many in flight.
        flying = prices.saved / prices.stored if prices.stored else 0.0
        if flying not in self._solvers:
            pairs = zip(self.stored, self.saved, strict=True)
            memory = tuple(stored + flying * saved for stored, saved in pairs)
            self._solvers[flying] = DualFunction(replace(self.graph, derived=True, memory=memory))
        return self._solvers[flying].at(prices.stored / prices.second)

    def cost(self, prices: Prices) -> float:
        """Return the least price of all."""
        return prices.second * self.least(prices).bound

    def alone(self, prices: Sequence[Prices]) -> Floats:
        """Return the least price of each variable alone: an array [variables, prices]."""
        # Without edges, the least over stages and over choices can be taken in any order.
        tables = zip(self.graph.unary, self.stored, self.saved, strict=True)
        rates = np.array([(each.second, each.stored, each.saved) for each in prices])
        least = [(rates @ np.stack(table)).min(axis=1) for table in tables]
        return np.array(least).reshape(len(least), len(prices))

    def way(self, prices: Prices) -> tuple[float, Way]:
        """Return the least price of all, and a way to run them at it."""
        near = self.least(prices)
        # A relaxation's choices need not cost what is least, so the seconds are what is left of it.
        stored, saved = (
            math.fsum(
                float(table[choice]) for table, choice in zip(some, near.choices, strict=True)
            )
            for some in (self.stored, self.saved)
        )
        used = prices.stored * stored + prices.saved * saved
        seconds = near.bound - used / prices.second
        return prices.second * near.bound, Way(seconds=seconds, stored=stored, saved=saved)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    """Variables that no cut divides, such as those of a layer, unless a stage begins among them.

    There are `count` of them, of which `whole` has the seconds and bytes. `blocks`: its parts in
    the order in which they run, between which stages may begin. `loose`: what is in none of them,
    as no single operator has it. `span`: the places of the first and the last operator.
    """

    count: int
    span: tuple[int, int]
    whole: Piece
    blocks: tuple[Piece, ...]
    loose: Piece


def units_of(tables: Tables, counts: Counts, saved: Sequence[Floats]) -> list[Unit]:
    """Return the units of tables, of which `saved` has the bytes of one micro-batch in flight.

    The tables are of one pass with nothing in flight. Variables of equally many equal layers that
    edges join are a unit. What is between units takes nothing.
    """
    # Layers that folding has made one have its number of them, and the others 1.
    numbers = [
        (counts.operators if one.what == "operator" else counts.tensors).get(one.name, 1)
        for one in tables.variables
    ]
    model = Piece(tables.graph, tables.graph.memory or (), tuple(saved))
    order = {op.name: place for place, op in enumerate(tables.analysis.graph.operators)}
    places = [order[one.name] if one.what == "operator" else None for one in tables.variables]
    units = []
    for members in _joined(tables.graph, numbers):
        whole = model.part(members)
        own = [places[v] for v in members]
        blocks, loose = _blocks(whole.graph, own)
        # A parameter that nothing reads has no place, and is as well at the beginning.
        span = [place for place in own if place is not None] or [0]
        units.append(
            Unit(
                count=numbers[members[0]],
                span=(min(span), max(span)),
                whole=whole,
                blocks=tuple(whole.part(block) for block in blocks),
                loose=whole.part(loose),
            )
        )
    return units


def _joined(graph: CostGraph, numbers: Sequence[int]) -> list[list[int]]:
    """Return the variables that edges between equal numbers join."""
    parts = nx.Graph()
    parts.add_nodes_from(range(len(numbers)))
    parts.add_edges_from((u, v) for u, v in graph.edges if numbers[u] == numbers[v])
    return [sorted(part) for part in nx.connected_components(parts)]


def _blocks(graph: CostGraph, places: Sequence[int | None]) -> tuple[list[list[int]], list[int]]:
    """Return the variables of each block in order, and those that are in none.

    `places`: of operators in the order in which they run. What a single operator reads or makes is
    with that operator.
    """
    beside: dict[int, set[int]] = {v: set() for v, place in enumerate(places) if place is None}
    for u, v in graph.edges:
        for one, other in ((u, v), (v, u)):
            if one in beside:
                beside[one].add(other)
    operators = sorted((place, v) for v, place in enumerate(places) if place is not None)
    length = math.ceil(len(operators) / BLOCKS) or 1
    block_of = {v: number // length for number, (_, v) in enumerate(operators)}
    blocks: list[list[int]] = [[] for _ in range(math.ceil(len(operators) / length))]
    loose = []
    for v in range(len(places)):
        # A value that several operators read may be on any of their stages.
        owner = next(iter(beside[v])) if v in beside and len(beside[v]) == 1 else v
        if owner in block_of:
            blocks[block_of[owner]].append(v)
        else:
            loose.append(v)
    return blocks, loose


def _part(graph: CostGraph, members: Sequence[int]) -> CostGraph:
    """Return the graph of some variables alone, without memory."""
    place = {v: number for number, v in enumerate(members)}
    edges = {
        (place[u], place[v]): table
        for (u, v), table in graph.edges.items()
        if u in place and v in place
    }
    return CostGraph(
        derived=True,
        sizes=tuple(graph.sizes[v] for v in members),
        unary=tuple(graph.unary[v] for v in members),
        edges=edges,
    )
