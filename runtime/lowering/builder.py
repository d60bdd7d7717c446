"""Builds the segments of this rank from a scheduled program, step after step."""

from __future__ import annotations

import itertools
import operator as python_operator
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir import Operator, Role
from autopar.order.beside import works_before
from autopar.order.scheduled import Scheduled, Segment
from autopar.runtime.operators.functions import arguments_of, named, returns_sequence, writable
from autopar.runtime.operators.local_call import LocalOperator
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.redistribution.steps import ON_ONE_DEVICE, step
from autopar.sharding.layout import Layout, R, format_layout, replicated
from autopar.sharding.program import Compute

from .delayed_weight_gradients import product
from .draft import Draft
from .frame import Frame
from .layers import Layers
from .program import LocalProgram, Place, Time, identifier
from .redistributions import Transit, describe

Arrival = tuple[str, Layout]
"""A value that one stage hands to another, and the layout in which it comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Values that a stage's program gets from other stages, and those that it hands to them."""

    arrivals: tuple[Arrival, ...] = ()
    handed: tuple[Arrival, ...] = ()


class Builder:
    """Lowers a program step after step into the draft of the present segment."""

    def __init__(
        self,
        plan: Scheduled,
        groups: DeviceGroups,
        device: torch.device,
        time: Time | None,
        exchange: Exchange,
        *,
        late: bool = False,
    ) -> None:
        self.late = late
        self.plan = plan
        self.program = plan.program
        self.model = plan.program.graph
        self.device = device
        self.time = time
        self.exchange = exchange
        self.frame = Frame(plan, groups, time)
        self.transit = Transit(self.frame, self.model)
        self.drafts: list[Draft] = []
        self.draft = Draft(0, recomputed=False)
        # Layers of the present segment beside whose exchanges others run.
        self.apart: set[int] = set()
        self.layers = Layers(self.frame, device, self._value)
        self.tags: set[str] = set()
        # The number of the segment that computes each value; -1 is before the first one.
        self.segment_of = {self.frame.place(*arrival): -1 for arrival in exchange.arrivals}
        self.whole_sources = self._find_whole_sources()

    def _find_whole_sources(self) -> set[str]:
        """Sources that come whole, and are cut for the micro-batch when they are read.

        Inputs of the whole batch are read on their own device.
        """
        sources = set(self.model.inputs)
        if self.time is None:
            return sources
        # A micro-batch reads constants, and the values that are computed once a step, as sources.
        decided = self.program.assignment.decisions
        for operator in self.model.operators:
            if operator.name in decided and decided[operator.name].rule is None:
                sources.update(operator.outputs)
        constants = (t.name for t in self.model.tensors.values() if t.role is Role.CONSTANT)
        return sources | set(constants)

    def run(self) -> LocalProgram:
        """Lower every segment in its order."""
        for number, segment in enumerate(self.plan.segments):
            self.draft = Draft(number, recomputed=segment.recomputed and self.plan.trains)
            self.drafts.append(self.draft)
            self._segment(segment)
        outputs = self._outputs()
        places = tuple(self.frame.place(*pair) for pair in outputs)
        updates = tuple(self._updates())
        handed = tuple(self.frame.place(*value) for value in self.exchange.handed)
        final = dict.fromkeys((*places, *(place for _, place in updates), *handed))
        # Values that leave the program leave its last segment.
        for place in final:
            self._value(place)
        read = {place for draft in self.drafts for place in draft.values}
        gradients = self.program.assignment.gradients | self.tags
        names = [name for name, _ in outputs]
        return LocalProgram(
            # Finished only now, when it is known which values later segments read.
            segments=tuple(
                draft.finish(self._results(draft, read, final), gradients) for draft in self.drafts
            ),
            outputs=tuple((name, self.frame.joined(name, layout)) for name, layout in outputs),
            output_places=places,
            updates=updates,
            handed=handed,
            loss=names.index(self.model.loss) if self.model.loss in names else None,
        )

    def _segment(self, segment: Segment) -> None:
        """Lower the steps of a segment, and what it takes from and hands to its neighbours."""
        draft = self.draft
        works = works_before(self.program, segment.steps, segment.working)
        self.apart = set(itertools.chain.from_iterable(works.values()))
        for index in (*segment.working, *segment.arriving):
            self.layers.take(draft, self._layer(index), home=index in segment.arriving)
        for index in segment.steps:
            for layer in works.get(index, ()):
                self.layers.work(draft, self._layer(layer))
            self._step(index, working=index in segment.working)
        for layer in works.get(None, ()):
            self.layers.work(draft, self._layer(layer))
        for index in segment.leaving:
            self.layers.leave(draft, self._layer(index))
        # Another micro-batch's segments come before the next one of this.
        for index in (*segment.working, *segment.leaving):
            places = self.layers.hand_on(draft, self._layer(index))
            self.segment_of.update(dict.fromkeys(places, draft.number))
            self.tags.update(self.layers.flows(self._layer(index)))
        # No other value is on its way between segments: a later one could run much later.
        for place in (*draft.coming, *draft.away):
            self._value(place)

    def _layer(self, index: int) -> Compute:
        item = self.program.steps[index]
        assert isinstance(item, Compute)
        return item

    def _results(
        self, draft: Draft, read: Container[Place], final: Iterable[Place]
    ) -> tuple[Place, ...]:
        """The outputs of a segment: values that later segments read.

        The last segment gives all that leaves the program, too.
        """
        own = [
            place
            for place in draft.nodes
            if place in read and self.segment_of.get(place) == draft.number
        ]
        leaving = final if draft is self.drafts[-1] else ()
        return tuple(dict.fromkeys((*own, *leaving)))

    def preamble(self, names: Sequence[str]) -> tuple[fx.GraphModule, tuple[str, ...]]:
        """Lower the operators behind `names`, which are whole."""
        needed = set(names)
        behind: list[Operator] = []
        # Backwards, so that what an operator reads is known before its producers are looked at.
        for operator in reversed(self.model.operators):
            if not needed.isdisjoint(operator.outputs):
                behind.append(operator)
                needed.update(operator.inputs)
        whole = replicated(len(self.frame.axes))
        arguments = tuple(
            name
            for name, t in self.model.tensors.items()
            if name in needed and t.role in (Role.INPUT, Role.CONSTANT)
        )
        for name in arguments:
            self._on_device((name, whole))
        decisions = self.program.assignment.decisions
        for operator in reversed(behind):
            self._compute(Compute(operator=operator, decision=decisions[operator.name]))
        self.draft.graph.output(tuple(self._value((name, whole)) for name in names))
        module = fx.GraphModule(torch.nn.Module(), self.draft.graph, class_name="Preamble")
        return module, arguments

    def _outputs(self) -> tuple[tuple[str, Layout], ...]:
        """The outputs computed here, with the loss behind them if it is no output."""
        planned = self.program.assignment.outputs
        loss = (self.model.loss,) if self.model.loss else ()
        names = dict.fromkeys((*self.model.outputs, *loss))
        return tuple((name, planned[name]) for name in names if name in planned)

    def _updates(self) -> list[tuple[str, Place]]:
        """The constants that change here.

        Those with new values from the preamble change with it.
        """
        whole = replicated(len(self.frame.axes))
        planned = self.program.assignment.outputs
        return [
            (name, self.frame.place(fresh, whole))
            for name, fresh in self.model.updates.items()
            if fresh in planned and (self.time is None or fresh not in self.whole_sources)
        ]

    # --- values ---

    def _value(self, place: Place) -> fx.Node:
        """The node of a value: of this segment, of an earlier one, a parameter, or a source."""
        draft = self.draft
        if place in draft.coming:
            self.transit.arrive(draft, place)
        if place in draft.away:
            away = draft.away.pop(place)
            self._scaled(away.item, [self.layers.arrive(draft, away)], away.local.scale)
        if place in draft.nodes:
            return draft.nodes[place]
        name, layout = place
        role = self.model.tensors[name].role
        if role is Role.PARAMETER:
            return draft.parameter(place)
        if place in self.segment_of:
            return draft.value(place)
        whole_constant = role is Role.CONSTANT and layout == replicated(len(self.frame.axes))
        if name in self.whole_sources or whole_constant:
            return self._on_device(place)
        raise PlanError(f"the plan reads {name!r} as [{format_layout(layout)}] before it is made")

    def _enter(self, place: Place, node: fx.Node) -> None:
        """Enter the node of a value that this segment computes."""
        self.draft.nodes[place] = node
        self.segment_of[place] = self.draft.number

    def _on_device(self, place: Place) -> fx.Node:
        """A source on this rank's device; of an input only the part that is read gets there."""
        value = self._source(place)
        if self.model.tensors[place[0]].role is Role.INPUT and self.device.type != "cpu":
            value = self.draft.graph.create_node(
                "call_method", "to", (value, self.device), name=f"{identifier(place[0])}_here"
            )
        self._enter(place, value)
        return value

    def _source(self, place: Place) -> fx.Node:
        """A value that comes whole (cut for the micro-batch), in the layout in which it is read."""
        draft = self.draft
        if place in draft.hosted:
            return draft.hosted[place]
        name = place[0]
        times = 0 if self.time is None else 1
        lead = place[1][:times]
        layout = place[1][times:]
        if all(p == R for p in layout):
            value = draft.source((name, lead[0] if lead else None))
        else:
            value = self._cut_source(name, lead, layout)
        draft.hosted[place] = value
        return value

    def _cut_source(self, name: str, lead: Layout, layout: Layout) -> fx.Node:
        """A source brought to a layout by the plan's redistribution of it."""
        chains = self.program.assignment.chains.get(name, ())
        chain = next((chain for chain in chains if chain[-1] == layout), None)
        if chain is None:
            raise PlanError(
                f"the plan has no redistribution of {name!r} to [{format_layout(layout)}]"
            )
        actions = self.transit.chain(tuple((*lead, *c) for c in chain))
        start = name, (*lead, *chain[0])
        local = all(ahead.name in ON_ONE_DEVICE for ahead, _, _ in actions)
        # An input is cut before it is copied to the device, unless ranks must communicate.
        hosted = self.model.tensors[name].role is Role.INPUT and local
        value = self._source(start) if hosted else self._value(start)
        for ahead, _, group in actions:
            value = self.draft.graph.create_node(
                "call_function", step, (value, ahead, None, group), name=f"{identifier(name)}_part"
            )
        return value

    # --- steps ---

    def _step(self, index: int, *, working: bool) -> None:
        """Lower one step of the program; of a layer that has left before only its work."""
        item = self.program.steps[index]
        if isinstance(item, Compute):
            if working:
                self.layers.work(self.draft, item)
            elif index in self.apart:
                self.layers.leave(self.draft, item)
            elif self.frame.runs(item):
                self._compute(item)
        elif item.tensor not in self.whole_sources:
            value = self._value(self.frame.place(item.tensor, item.chain[0]))
            place = self.transit.begin(self.draft, item, value)
            self.segment_of[place] = self.draft.number

    def _compute(self, item: Compute) -> None:
        """One call with local sizes; a mean over a split factor is scaled."""
        operator = item.operator
        graph = self.draft.graph
        local: LocalOperator = self.frame.local(item)
        inputs = [self._value(place) for place in self.frame.inputs(item)]
        if self.time is not None:
            # The shares of all micro-batches add up to the value, and so do their gradients.
            inputs = [
                graph.call_function(torch.div, (value, self.time.count)) if shared else value
                for value, shared in zip(inputs, self.frame.shared(item), strict=True)
            ]
        arguments = arguments_of(local.function, local.attributes, inputs, self.device)
        function = named(local.function)
        arguments = writable(arguments)
        # In a zero-bubble schedule gradients of weights wait until other stages have theirs of
        # values.
        weights = self.frame.weights(item) if self.late else {}
        if weights:
            function = product(function, weights)
        result = graph.create_node(
            "call_function", function, (), arguments, name=identifier(operator.name)
        )
        results = self._unpack(result, operator, returns_sequence(local.function, operator))
        self._scaled(item, results, local.scale)

    def _scaled(self, item: Compute, results: Sequence[fx.Node], scale: float) -> None:
        """Enter an operator's results, brought to this rank's share."""
        # A mean over a split factor is a sum of the ranks' means: each is scaled to its share.
        if scale != 1.0:
            results = [self.draft.graph.call_function(torch.mul, (v, scale)) for v in results]
        for place, value in zip(self.frame.outputs(item), results, strict=True):
            value.meta["tensor"] = describe(self.model.tensors[place[0]], place[1])
            self._enter(place, value)

    def _unpack(self, result: fx.Node, operator: Operator, sequence: bool) -> list[fx.Node]:
        """The nodes of an operator's outputs."""
        graph = self.draft.graph
        if sequence:
            return [
                graph.create_node(
                    "call_function", python_operator.getitem, (result, i), name=identifier(output)
                )
                for i, output in enumerate(operator.outputs)
            ]
        return [result]
