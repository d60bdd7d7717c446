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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.order.actions import Action, Word
from autopar.order.beside import as_they_work
from autopar.order.scheduled import Scheduled
from autopar.order.units import Unit
from autopar.order.value_flow import PlacedValue, boundaries
from autopar.sharding.program import Compute, operator_collectives

from .live_bytes import CLOSED, GATHERED, GRADIENT, MISSING, STORED, Live
from .saved_values import Facts
from .step_memories import Here, Saved, Way
from .step_script import Habits
from .unit_memories import UnitMemories

PLAIN = Habits()
PLAYED = 3


def step_bytes(
    plan: Scheduled, facts: Mapping[str, Facts], habits: Habits = PLAIN, *, train: bool
) -> Live:
    """Play a step of a program under its schedule."""
    return _Played(plan, facts, habits, train).live(accumulating=False)


@dataclass(slots=True, kw_only=True)
class _MicroBatch:
    """The memories of a micro-batch under way, as `_Played` names them.

    `rows`: messages of layers of experts, between the segments where they leave and come.
    """

    here: Here
    saved: Saved = field(default_factory=dict)
    tapes: dict[int, list[int]] = field(default_factory=dict)
    behind: dict[int, int] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)


class _Played(UnitMemories):
    """The step while it is played.

    `values` holds gathered parameters, `here` the present micro-batch's other results. `outer`,
    `given`: the places that enter each segment, and those that leave it. `working`: the steps of
    each segment in the order in which they work.
    """

    def __init__(
        self, plan: Scheduled, facts: Mapping[str, Facts], habits: Habits, train: bool
    ) -> None:
        count = plan.schedule.micro_batches
        schedule = replace(plan.schedule, micro_batches=min(count, PLAYED))
        habits = replace(habits, once=count > 1)
        super().__init__(replace(plan, schedule=schedule), facts, habits)
        self.count = count
        self.train = train
        program = plan.program
        stretches = [[program.steps[index] for index in one.steps] for one in plan.segments]
        outer, given = boundaries(stretches, program.assignment.outputs.items())
        self.outer = [self._numbers_of(places) for places in outer]
        self.given = [self._numbers_of(places) for places in given]
        self.working = [as_they_work(program, one.steps, one.working) for one in plan.segments]
        self.leaving = self._numbers_of(program.assignment.outputs.items())
        self.exchanged: dict[tuple[int, str], list[int]] = {}
        self.micro_batches: dict[int, _MicroBatch] = {}
        self.outputs: list[int] = []
        # Units may move before the first segment runs.
        self._turn_to(0)
        for action in self.plan.actions():
            self._do(action)
        self._end()

    def _numbers_of(self, places: Iterable[PlacedValue]) -> list[int]:
        return [self.steps.number(place) for place in places]

    def _turn_to(self, micro_batch: int) -> None:
        """Go on with a micro-batch; passes of two may take turns."""
        if micro_batch not in self.micro_batches:
            self.micro_batches[micro_batch] = _MicroBatch(here=self.nowhere())
        one = self.micro_batches[micro_batch]
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
        # What the first micro-batch made once is there in all others.
        if number == 0:
            for place, memory in enumerate(self.prepared):
                if memory != MISSING:
                    self.here[place] = memory
        entered = [self.value(place, self.here) for place in self.outer[number]]
        keeping = self.train and not segment.recomputed
        self._walk(number, self.here, Way.KEEPING if keeping else Way.FORWARD)
        for index in segment.leaving:
            self._exchange(index, "forward", home=False)
        for index in segment.arriving:
            self.read(self.rows.pop(index))
        # The caller holds a segment's inputs until the segment is over.
        for memory in entered:
            self.read(memory)
        if self.train:
            given = [] if segment.recomputed else [self.here[place] for place in self.given[number]]
            kind = self.memories.kind
            self.tapes[number] = [
                # A recomputed segment keeps no gathered parameters: its second pass has them again.
                *(
                    m
                    for m in entered
                    if m != STORED and not (segment.recomputed and kind[m] % CLOSED == GATHERED)
                ),
                *given,
            ]
        if number == len(self.plan.segments) - 1:
            self._finish(first=first)

    def _walk(self, number: int, here: Here, way: Way) -> None:
        """Run the steps of a segment, with the messages home of layers that work in it."""
        working = self.plan.segments[number].working
        steps = self.working[number] if way is not Way.BACK else self.working[number][::-1]
        phase = "forward" if way is not Way.BACK else "backward"
        start = 0
        for place, index in enumerate(steps if working else ()):
            if index in working:
                self.walk(steps[start : place + 1], here, self.saved, way)
                self._exchange(index, phase, home=True)
                start = place + 1
        self.walk(steps[start:], here, self.saved, way)

    def _exchange(self, index: int, phase: str, *, home: bool) -> None:
        """The message of a layer to or from its experts, which is held as sent and as received."""
        if index in self.rows:
            self.read(self.rows.pop(index))
        # Every micro-batch exchanges the same bytes, and working them out takes long.
        if (index, phase) not in self.exchanged:
            step = self.program.steps[index]
            assert isinstance(step, Compute)
            gradients = self.program.assignment.gradients
            self.exchanged[index, phase] = [
                c.nbytes
                for c in operator_collectives(self.program.graph, step, self.mesh, gradients)
                if c.phase == phase and c.kind == "all_to_all"
            ]
        sent = self.exchanged[index, phase]
        if sent:
            self.rows[index] = self.new(2 * sent[-1 if home else 0])

    def _finish(self, *, first: bool) -> None:
        """Keep the outputs of every micro-batch to the end of the step."""
        for place in self.leaving:
            memory = self.value(place, self.here)
            if memory != STORED and self.places[place][0] != self.program.graph.loss:
                self.outputs.append(memory)
                # Outputs of the micro-batches that are not played are there as well.
                if first and self.count > PLAYED:
                    self.outputs.append(self.new((self.count - PLAYED) * self.size[memory]))
        self.forward_end = self.now

    def _backward(self, number: int) -> None:
        segment = self.plan.segments[number]
        graph = self.program.graph
        if graph.loss is not None and number == len(self.plan.segments) - 1:
            loss = self.steps.number((graph.loss, self.program.assignment.outputs[graph.loss]))
            self.behind[loss] = self.new(self.tensors[graph.loss].bytes)
        upstream = [
            (place, self.behind.pop(place)) for place in self.given[number] if place in self.behind
        ]
        self.wait(segment.wanted)
        if segment.recomputed:
            # The second pass makes values anew, while others hold those of the first.
            self.walk(self.working[number], self.here[:], self.saved, Way.KEEPING)
        for place, gradient in upstream:
            self.gradients[place] = gradient
            self.memories.holders[gradient] = 2  # the pass and its caller
        self._walk(number, self.here, Way.BACK)
        for index in segment.arriving:
            self._exchange(index, "backward", home=False)
        for index in segment.leaving:
            self.read(self.rows.pop(index, STORED))
        gradients = [
            (place, self.gradients[place])
            for place in self.outer[number]
            if self.gradients[place] != MISSING
        ]
        self.bring(gradients, made=True)
        for memory in (*(gradient for _, gradient in upstream), *self.tapes.pop(number, ())):
            self.read(memory)
        self.gradients[:] = self.nowhere()

    def _end(self) -> None:
        """Finish the step: gradients are complete; outputs and values made once live until here."""
        self.tick("")
        self.travel.settle()
        given = []
        types = self.types
        for place, memory in self.home.items():
            name, layout = self.places[place]
            tensor = self.tensors[name]
            if layout == self.program.assignment.storage[name]:
                if types.reduced(tensor) != types.stored(tensor):
                    self.tick(name)
                    self.read(memory)
                    shards = tensor.bytes / self.steps.bytes_of(name, layout)
                    memory = self.new(types.stored_bytes(tensor) / shards)
                self.mark(memory, GRADIENT)
                given.append(memory)
        for memory in (*given, *self.outputs, *self.prepared):
            self.read(memory)
