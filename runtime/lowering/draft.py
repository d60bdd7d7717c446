"""A segment under construction: an fx graph, its outside inputs, and the node of every value."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import fx

from autopar.sharding.layout import Placement
from autopar.sharding.program import Redistribute

from ..redistribution import Chain
from .program import LocalSegment, Place, identifier

Source = tuple[str, Placement | None]


class Coming(NamedTuple):
    """A redistribution under way: the node where it continues, all its steps, and the number of the present one."""

    node: fx.Node
    item: Redistribute
    chain: Chain
    number: int = 0


class Draft:
    """The graph of one segment; its values, parameters and sources are arguments, each kind by first use."""

    def __init__(self, number: int, *, again: bool) -> None:
        self.number, self.again = number, again
        self.graph = fx.Graph()
        self.nodes: dict[Place, fx.Node] = {}
        self.coming: dict[Place, Coming] = {}
        self.values: dict[Place, fx.Node] = {}
        self.parameters: dict[Place, fx.Node] = {}
        self.sources: dict[Source, fx.Node] = {}
        self.hosted: dict[Place, fx.Node] = {}  # sources and their parts on their own device, which may be another one
        self._names: Counter[str] = Counter()

    def value(self, place: Place) -> fx.Node:
        """A value of an earlier segment."""
        self.nodes[place] = self.values[place] = self._argument(place[0], [*self.values.values()])
        return self.nodes[place]

    def parameter(self, place: Place) -> fx.Node:
        """A parameter in its used layout."""
        before = [*self.values.values(), *self.parameters.values()]
        self.nodes[place] = self.parameters[place] = self._argument(place[0], before)
        return self.nodes[place]

    def source(self, source: Source) -> fx.Node:
        """An input or a constant."""
        if source not in self.sources:
            before = [*self.values.values(), *self.parameters.values(), *self.sources.values()]
            self.sources[source] = self._argument(source[0], before)
        return self.sources[source]

    def _argument(self, name: str, before: list[fx.Node]) -> fx.Node:
        """A placeholder behind those before it, with a unique name."""
        found = identifier(name)
        self._names[found] += 1
        text = found if self._names[found] == 1 else f"{found}_as_{self._names[found]}"
        first = next(iter(self.graph.nodes), None)
        if not before and first is None:
            return self.graph.placeholder(text)
        with self.graph.inserting_after(before[-1]) if before else self.graph.inserting_before(first):
            return self.graph.placeholder(text)

    def finish(self, outputs: tuple[Place, ...], gradients: frozenset[str]) -> LocalSegment:
        """The segment that gives the values at these places."""
        self.graph.output(tuple(self.nodes[place] for place in outputs))
        self.graph.lint()
        flows = tuple(name in gradients for name, _ in (*self.values, *self.parameters, *outputs))
        return LocalSegment(
            module=fx.GraphModule(torch.nn.Module(), self.graph, class_name=f"Segment{self.number}"),
            values=tuple(self.values),
            parameters=tuple(self.parameters),
            sources=tuple(self.sources),
            outputs=outputs,
            differentiable=flows,
            again=self.again,
        )
