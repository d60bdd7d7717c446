"""Layers of experts in a segment's graph that leave, work and arrive apart.

They do so in one segment, or leave at the end of one and come in a later one. There a layer's tag
and its way are values that one segment hands to another; the way is no tensor.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from autopar.ir import Ref, Value
from autopar.runtime.operators.functions import arguments_of
from autopar.runtime.operators.local_call import LocalOperator
from autopar.runtime.operators.phases import names_of, phases_of
from autopar.sharding.program import Compute

from .draft import Away, Draft
from .frame import Frame
from .program import Place, identifier


class Layers:
    """Writes the phases of layers into drafts; `value` gives the node of a layer's input."""

    def __init__(
        self, frame: Frame, device: torch.device, value: Callable[[Place], fx.Node]
    ) -> None:
        self.frame = frame
        self.device = device
        self.value = value

    def leave(self, draft: Draft, item: Compute) -> None:
        """Let the rows of a layer set off."""
        local = self.frame.local(item)
        phases = phases_of(local.function)
        node = self._call(draft, item, local, phases.leave, "leaves")
        self._under_way(draft, item, local, node, works=False)

    def work(self, draft: Draft, item: Compute) -> None:
        """Let a layer work on the rows that have come."""
        away = draft.away[self._place(item)]
        phases = phases_of(away.local.function)
        node = self._call(draft, item, away.local, phases.work, "works", away)
        self._under_way(draft, item, away.local, node, works=True)

    def arrive(self, draft: Draft, away: Away) -> fx.Node:
        """Wait for the results of a layer."""
        phases = phases_of(away.local.function)
        return self._call(draft, away.item, away.local, phases.arrive, "arrives", away)

    def hand_on(self, draft: Draft, item: Compute) -> tuple[Place, Place]:
        """Leave the rest of a layer to a later segment; the places of its tag and its way."""
        away = draft.away.pop(self._place(item))
        places = self.places(item, home=away.works)
        draft.nodes.update(zip(places, (away.tag, away.way), strict=True))
        return places

    def take(self, draft: Draft, item: Compute, *, home: bool) -> None:
        """Go on with a layer that an earlier segment has left."""
        tag, way = (draft.value(place) for place in self.places(item, home=home))
        draft.away[self._place(item)] = Away(tag, way, item, self.frame.local(item), home)

    def places(self, item: Compute, *, home: bool) -> tuple[Place, Place]:
        """The places of a layer's tag and its way, on the way to the experts or home."""
        name = f"{item.operator.outputs[0]} {'home' if home else 'away'}"
        return (name, ()), (f"{name} way", ())

    def flows(self, item: Compute) -> Iterator[str]:
        """The names of tags through which gradients flow."""
        operator = item.operator
        gradients = self.frame.program.assignment.gradients
        local = self.frame.local(item)
        taken = _read(self._attributes(local, phases_of(local.function).leave))
        # Where no gradient goes home, a tag with one would send an empty message.
        if any(operator.inputs[index] in gradients for index in taken):
            yield self.places(item, home=False)[0][0]
        if operator.outputs[0] in gradients:
            yield self.places(item, home=True)[0][0]

    def _place(self, item: Compute) -> Place:
        (place,) = self.frame.outputs(item)
        return place

    def _under_way(
        self, draft: Draft, item: Compute, local: LocalOperator, node: fx.Node, *, works: bool
    ) -> None:
        tag, way = (draft.graph.call_function(python_operator.getitem, (node, i)) for i in range(2))
        draft.away[self._place(item)] = Away(tag, way, item, local, works)

    def _call(
        self,
        draft: Draft,
        item: Compute,
        local: LocalOperator,
        phase: Callable[..., Any],
        word: str,
        away: Away | None = None,
    ) -> fx.Node:
        """The node of a phase, with those of the layer's arguments that it takes."""
        attributes = self._attributes(local, phase)
        read = set(_read(attributes))
        # Weights are read where the layer works, since only that segment has them gathered.
        inputs = [
            self.value(place) if index in read else None
            for index, place in enumerate(self.frame.inputs(item))
        ]
        return draft.graph.create_node(
            "call_function",
            phase,
            () if away is None else (away.tag, away.way),
            arguments_of(phase, attributes, inputs, self.device),
            name=f"{identifier(item.operator.name)}_{word}",
        )

    def _attributes(self, local: LocalOperator, phase: Callable[..., Any]) -> dict[str, Value]:
        return {n: local.attributes[n] for n in names_of(phase) if n in local.attributes}


def _read(value: Any) -> Iterator[int]:
    """The inputs to which attributes refer."""
    if isinstance(value, Ref):
        yield value.index
    elif isinstance(value, dict):
        for one in value.values():
            yield from _read(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _read(one)
