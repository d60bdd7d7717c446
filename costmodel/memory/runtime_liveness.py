"""Bytes alive at every moment of a step as the runtime executes it, action by action.

    a unit's values  from its gather to its release; longer if a reader keeps them for the backward
                     pass (gathered in each pass: once more)
    a gather         holds its flat message along with the values until the first segment reads them
    a segment        holds its inputs and results until its backward pass is over; if recomputed,
                     only its inputs
    a reduction      holds its flat message until the round behind its last collective, or the step
                     ends; a sum in place is the gradient itself

Of several micro-batches the first two and the last are played: those between are like the second,
with gradients added in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.order.actions import Action, Word
from autopar.order.beside import as_they_work
from autopar.order.scheduled import Scheduled
from autopar.order.units import Unit
from autopar.order.value_flow import boundaries, makes
from autopar.sharding.program import Compute, Redistribute, operator_collectives

from .live_bytes import GATHERED, GRADIENT, STORED, Live
from .saved_values import Facts
from .step_memories import Place
from .unit_memories import UnitMemories

PLAYED = 3


def step_bytes(plan: Scheduled, facts: Mapping[str, Facts], *, train: bool) -> Live:
    """Play a step of a program under its schedule."""
    return _Played(plan, facts, train).live(accumulating=False)


@dataclass(slots=True)
class _MicroBatch:
    """The memories of a micro-batch under way, as `_Played` names them.

    `rows`: messages of layers of experts, between the segments where they leave and come.
    """

    here: dict[Place, int] = field(default_factory=dict)
    tapes: dict[int, list[int]] = field(default_factory=dict)
    saved: dict[int, list[int]] = field(default_factory=dict)
    behind: dict[Place, int] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)


class _Played(UnitMemories):
    """The step while it is played.

    `values` holds gathered parameters, `here` the present micro-batch's other results.
    """

    def __init__(self, plan: Scheduled, facts: Mapping[str, Facts], train: bool) -> None:
        count = plan.schedule.micro_batches
        schedule = replace(plan.schedule, micro_batches=min(count, PLAYED))
        super().__init__(replace(plan, schedule=schedule), facts)
        self.count = count
        self.train = train
        stretches = [
            [plan.program.steps[index] for index in segment.steps] for segment in plan.segments
        ]
        self.outer, self.given = boundaries(stretches, plan.program.assignment.outputs.items())
        self.here: dict[Place, int] = {}
        self.prepared: dict[Place, int] = {}
        self.tapes: dict[int, list[int]] = {}
        self.rows: dict[int, int] = {}
        self.micro_batches: dict[int, _MicroBatch] = {}
        self.outputs: list[int] = []
        for action in self.plan.actions():
            self._do(action)
        self._end()

    def _turn_to(self, micro_batch: int) -> None:
        """Go on with a micro-batch; passes of two may take turns."""
        one = self.micro_batches.setdefault(micro_batch, _MicroBatch())
        self.here = one.here
        self.tapes = one.tapes
        self.saved = one.saved
        self.behind = one.behind
        self.rows = one.rows

    def _do(self, action: Action) -> None:
        if action.segment is not None:
            self._turn_to(action.micro_batch or 0)
        if action.word is Word.FORWARD:
            self._forward(action.segment or 0, first=action.micro_batch == 0)
        elif action.word is Word.BACKWARD:
            self._backward(action.segment or 0)
        elif action.unit is not None:
            self._move(action, self.plan.units[action.unit])

    def _move(self, action: Action, unit: Unit) -> None:
        if action.word is Word.RELEASE:
            self.release(unit)
            return
        assert action.round is not None
        if action.word is Word.GATHER:
            self.gather(unit, action.round)
        else:
            number = action.micro_batch or 0
            last = number == self.plan.schedule.micro_batches - 1
            self.reduce(unit, action.round, number, last=last)

    # --- segments ---

    def _forward(self, number: int, *, first: bool) -> None:
        segment = self.plan.segments[number]
        self.wait(segment.units)
        if number == 0:
            self.here.update(self.prepared)
        entered = [self.value(place, self.here) for place in self.outer[number]]
        for index in as_they_work(self.program, segment.steps, segment.working):
            self._step(index, self.here, keep=self.train and not segment.recomputed)
            if index in segment.working:
                self._exchange(index, "forward", home=True)
        for index in segment.leaving:
            self._exchange(index, "forward", home=False)
        for index in segment.arriving:
            self.read(self.rows.pop(index))
        # The caller holds a segment's inputs until the segment is over.
        for memory in entered:
            self.read(memory)
        if self.train:
            given = [] if segment.recomputed else [self.here[place] for place in self.given[number]]
            self.tapes[number] = [
                # A recomputed segment keeps no gathered parameters: its second pass has them again.
                *(
                    m
                    for m in entered
                    if m != STORED and not (segment.recomputed and self.what[m] == GATHERED)
                ),
                *given,
            ]
        if number == len(self.plan.segments) - 1:
            self._finish(first=first)

    def _exchange(self, index: int, phase: str, *, home: bool) -> None:
        """The message of a layer to or from its experts, which is held as sent and as received."""
        if index in self.rows:
            self.read(self.rows.pop(index))
        step = self.program.steps[index]
        assert isinstance(step, Compute)
        gradients = self.program.assignment.gradients
        sent = [
            c.nbytes
            for c in operator_collectives(self.program.graph, step, self.mesh, gradients)
            if c.phase == phase and c.kind == "all_to_all"
        ]
        if sent:
            self.rows[index] = self.new(2 * sent[-1 if home else 0])

    def _step(self, index: int, values: dict[Place, int], *, keep: bool) -> None:
        step = self.program.steps[index]
        if isinstance(step, Redistribute):
            self.tick(self.workers[index])
            self.redistribute(step, values)
        elif not all(place in self.prepared for place in makes(step)):
            self.tick(self.workers[index])
            self.compute(index, step, values, keep=keep)
            if self.count > 1 and step.decision.rule is None:  # made once for all micro-batches
                self.prepared.update((place, values[place]) for place in makes(step))

    def _finish(self, *, first: bool) -> None:
        """Keep the outputs of every micro-batch to the end of the step."""
        for place in self.program.assignment.outputs.items():
            memory = self.value(place, self.here)
            if memory != STORED and place[0] != self.program.graph.loss:
                self.outputs.append(memory)
                # Outputs of the micro-batches that are not played are there as well.
                if first and self.count > PLAYED:
                    self.outputs.append(self.new((self.count - PLAYED) * self.size[memory]))
        self.forward_end = self.now

    def _backward(self, number: int) -> None:
        segment = self.plan.segments[number]
        graph = self.program.graph
        if graph.loss is not None and number == len(self.plan.segments) - 1:
            self.behind[graph.loss, self.program.assignment.outputs[graph.loss]] = self.new(
                self.tensors[graph.loss].bytes
            )
        upstream = [
            (place, self.behind.pop(place)) for place in self.given[number] if place in self.behind
        ]
        self.wait(segment.wanted)
        values = dict(self.here)
        order = as_they_work(self.program, segment.steps, segment.working)
        for index in order if segment.recomputed else ():
            self._step(index, values, keep=True)
        for place, gradient in upstream:
            self.gradients[place] = gradient
            self.holders[gradient] = 2  # the pass and its caller
        for index in reversed(order):
            self._step_back(index)
            if index in segment.working:
                self._exchange(index, "backward", home=True)
        for index in segment.arriving:
            self._exchange(index, "backward", home=False)
        for index in segment.leaving:
            self.read(self.rows.pop(index, STORED))
        gradients = [
            (place, self.gradients[place])
            for place in self.outer[number]
            if place in self.gradients
        ]
        self.bring(gradients, made=True)
        for memory in (*(gradient for _, gradient in upstream), *self.tapes.pop(number, ())):
            self.read(memory)
        self.gradients.clear()

    def _step_back(self, index: int) -> None:
        step = self.program.steps[index]
        if isinstance(step, Redistribute):
            self.redistribute_back(index, step)
        elif self.facts[step.operator.name].backward:
            self.compute_back(index, step)

    def _end(self) -> None:
        """Finish the step: gradients are complete; outputs and values made once live until here."""
        self.tick("")
        self.travel.settle()
        given = []
        for (name, layout), memory in self.home.items():
            if layout == self.program.assignment.storage[name]:
                if self.types.reduced(self.tensors[name]) != self.types.stored(self.tensors[name]):
                    self.tick(name)
                    self.read(memory)
                    shards = self.tensors[name].bytes / self.bytes_of(name, layout)
                    memory = self.new(self.types.stored_bytes(self.tensors[name]) / shards)
                self.what[memory] = GRADIENT
                given.append(memory)
        for memory in given:
            self.read(memory)
        for memory in (*self.outputs, *self.prepared.values()):
            self.read(memory)
