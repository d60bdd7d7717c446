"""A segment under construction: an fx graph, its outside inputs, and the node of every value."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.runtime.operators.local_call import LocalOperator
from autopar.runtime.redistribution.steps import Chain
from autopar.sharding.layout import Placement
from autopar.sharding.program import Compute, Redistribute

from .program import LocalSegment, Place, identifier

Source = tuple[str, Placement | None]


class Coming(NamedTuple):
    """A redistribution under way: the node where it goes on, its steps, and the present step."""

    node: fx.Node
    item: Redistribute
    chain: Chain
    number: int = 0


class Away(NamedTuple):
    """A layer whose rows are under way: its tag and its way, and whether it has worked."""

    tag: fx.Node
    way: fx.Node
    item: Compute
    local: LocalOperator
    works: bool = False


class Draft:
    """The graph of one segment.

    Its values, parameters and sources are arguments in this order, each kind by first use.
    """

    def __init__(self, number: int, *, recomputed: bool) -> None:
        self.number = number
        self.recomputed = recomputed
        self.graph = fx.Graph()
        self.nodes: dict[Place, fx.Node] = {}
        self.coming: dict[Place, Coming] = {}
        self.away: dict[Place, Away] = {}
        self.values: dict[Place, fx.Node] = {}
        self.parameters: dict[Place, fx.Node] = {}
        self.sources: dict[Source, fx.Node] = {}
        # Sources and their parts on their own device, which may be another one.
        self.hosted: dict[Place, fx.Node] = {}
        self._names: Counter[str] = Counter()

    def value(self, place: Place) -> fx.Node:
        """An argument for a value of an earlier segment."""
        self.nodes[place] = self.values[place] = self._argument(place[0], [*self.values.values()])
        return self.nodes[place]

    def parameter(self, place: Place) -> fx.Node:
        """An argument for a parameter in its used layout."""
        before = [*self.values.values(), *self.parameters.values()]
        self.nodes[place] = self.parameters[place] = self._argument(place[0], before)
        return self.nodes[place]

    def source(self, source: Source) -> fx.Node:
        """An argument for an input or a constant."""
        if source not in self.sources:
            before = [*self.values.values(), *self.parameters.values(), *self.sources.values()]
            self.sources[source] = self._argument(source[0], before)
        return self.sources[source]

    def _argument(self, name: str, before: list[fx.Node]) -> fx.Node:
        """A placeholder behind those before it, with a unique name."""
        text = identifier(name)
        self._names[text] += 1
        # A tensor in several layouts is several arguments.
        if self._names[text] > 1:
            text = f"{text}_as_{self._names[text]}"
        # Arguments stand before all calls, in the order in which the stage gives them.
        first = next(iter(self.graph.nodes), None)
        place: contextlib.AbstractContextManager[Any]
        if before:
            place = self.graph.inserting_after(before[-1])
        elif first is not None:
            place = self.graph.inserting_before(first)
        else:
            place = contextlib.nullcontext()
        with place:
            return self.graph.placeholder(text)

    def finish(self, outputs: tuple[Place, ...], gradients: frozenset[str]) -> LocalSegment:
        """The segment that gives the values at these places."""
        self.graph.output(tuple(self.nodes[place] for place in outputs))
        self.graph.lint()
        flows = tuple(name in gradients for name, _ in (*self.values, *self.parameters, *outputs))
        name = f"Segment{self.number}"
        return LocalSegment(
            module=fx.GraphModule(torch.nn.Module(), self.graph, class_name=name),
            values=tuple(self.values),
            parameters=tuple(self.parameters),
            sources=tuple(self.sources),
            outputs=outputs,
            differentiable=flows,
            recomputed=self.recomputed,
        )
