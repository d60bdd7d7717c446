"""Bytes alive at every moment of a step as the runtime executes it, action by action.

    a unit's values  from its gather to its release; longer if a reader keeps them for the backward
                     pass (gathered in each pass: once more)
    a gather         holds its flat message along with the values until the first segment reads them
    a segment        holds its inputs and results until its backward pass is over; if recomputed,
                     only its inputs
    a reduction      holds its flat message until the next one begins, or the step ends; a sum in
                     place is the gradient itself

Of several micro-batches the first two and the last are played: those between are like the second,
with gradients added in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir import Role
from autopar.order.actions import Action, Word
from autopar.order.scheduled import Mode, Scheduled
from autopar.order.unit_collectives import reduce_collectives
from autopar.order.units import Unit
from autopar.order.value_flow import boundaries, makes, moves_value, only_casts
from autopar.sharding.mesh import degree_of
from autopar.sharding.program import Redistribute

from .flat_messages import FlatStep, Going, Moving, carried, flat_steps
from .live_bytes import BUFFER, GATHERED, GRADIENT, STORED, Live
from .saved_values import Facts
from .step_memories import Place, Steps

PLAYED = 3


def step_bytes(plan: Scheduled, facts: Mapping[str, Facts], *, train: bool) -> Live:
    """Play a step of a program under its schedule."""
    return _Played(plan, facts, train).live(accumulating=False)


class _Played(Steps):
    """The step while it is played.

    `values` holds gathered parameters, `here` the micro-batch's other results.
    """

    def __init__(self, plan: Scheduled, facts: Mapping[str, Facts], train: bool) -> None:
        super().__init__(plan.program, facts, plan.schedule.types)
        count = plan.schedule.micro_batches
        self.count = count
        self.train = train
        self.plan = replace(plan, schedule=replace(plan.schedule, micro_batches=min(count, PLAYED)))
        stretches = [
            [plan.program.steps[index] for index in segment.steps] for segment in plan.segments
        ]
        self.outer, self.given = boundaries(stretches, plan.program.assignment.outputs.items())
        self.here: dict[Place, int] = {}
        self.prepared: dict[Place, int] = {}
        self.tapes: dict[int, list[int]] = {}
        self.behind: dict[Place, int] = {}
        self.home: dict[Place, int] = {}
        self.own: set[Place] = set()
        self.closed: set[int] = set()
        self.coming: dict[int, Moving] = {}
        self.going: list[Going] = []
        self.outputs: list[int] = []
        self.flat: dict[tuple[tuple[int, ...], bool], list[FlatStep]] = {}
        self.followers = plan.followers()
        for action in self.plan.actions():
            self._do(action)
        self._end()

    def _do(self, action: Action) -> None:
        if action.word is Word.FORWARD:
            self._forward(action.segment or 0, first=action.micro_batch == 0)
        elif action.word is Word.BACKWARD:
            self._backward(action.segment or 0)
        elif action.unit is not None:
            unit = self.plan.units[action.unit]
            if action.word is Word.GATHER:
                self._gather(unit)
            elif action.word is Word.RELEASE:
                self._release(unit)
            else:
                self._reduce(unit, last=action.micro_batch == self.plan.schedule.micro_batches - 1)

    def read(self, memory: int) -> None:
        # Released memory is not there, even if something still refers to it.
        if memory not in self.closed:
            super().read(memory)

    # --- segments ---

    def _forward(self, number: int, *, first: bool) -> None:
        segment = self.plan.segments[number]
        self._wait(segment.units)
        if number == 0:
            self.here = dict(self.prepared)
        entered = [self.value(place, self.here) for place in self.outer[number]]
        for index in segment.steps:
            self._step(index, self.here, keep=self.train and not segment.recomputed)
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

    def _step(self, index: int, values: dict[Place, int], *, keep: bool) -> None:
        step = self.program.steps[index]
        if isinstance(step, Redistribute):
            self.tick(step.tensor)
            self.redistribute(step, values)
        elif not all(place in self.prepared for place in makes(step)):
            self.tick(step.operator.name)
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
        steps = self.program.steps
        graph = self.program.graph
        if graph.loss is not None and number == len(self.plan.segments) - 1:
            self.behind[graph.loss, self.program.assignment.outputs[graph.loss]] = self.new(
                self.tensors[graph.loss].bytes
            )
        upstream = [
            (place, self.behind.pop(place)) for place in self.given[number] if place in self.behind
        ]
        self._wait(segment.wanted)
        values = dict(self.here)
        for index in segment.steps if segment.recomputed else ():
            self._step(index, values, keep=True)
        for place, gradient in upstream:
            self.gradients[place] = gradient
            self.holders[gradient] = 2  # the pass and its caller
        for index in reversed(segment.steps):
            step = steps[index]
            if isinstance(step, Redistribute):
                self.redistribute_back(step)
            elif self.facts[step.operator.name].backward:
                self.compute_back(index, step)
        gradients = [
            (place, self.gradients[place])
            for place in self.outer[number]
            if place in self.gradients
        ]
        self._bring(gradients, made=True)
        for memory in (*(gradient for _, gradient in upstream), *self.tapes.pop(number, ())):
            self.read(memory)
        self.gradients.clear()

    def _bring(self, gradients: Sequence[tuple[Place, int]], *, made: bool = False) -> None:
        """Add each gradient to earlier ones, in place if nothing else holds them.

        All are held until the last is added. `made`: gradients of a backward pass, which are cast
        to the type in which they travel.
        """
        for place, gradient in gradients:
            parameter = self.tensors[place[0]].role is Role.PARAMETER
            if made and parameter and self.is_cast(place[0]):
                self.tick(place[0])
                self.read(gradient)
                gradient = self.new(self.gradient_bytes(*place))
            held = self.home if parameter else self.behind
            before = held.get(place)
            if before is None:
                total = gradient
            else:
                self.tick(place[0])
                self.read(before)
                # The first gradient may be held elsewhere, so the first sum is made in new memory.
                total = before if place in self.own else self.new(self.size[before])
                if parameter:
                    self.own.add(place)
            held[place] = total
            if parameter:
                self.what[total] = GRADIENT
        for _, gradient in gradients:
            self.read(gradient)

    # --- units ---

    def _gather(self, unit: Unit) -> None:
        self._wait([unit.number])
        self.tick(self._name(unit))
        moving = self._gathering(unit)
        # It stops while a collective is under way; without one the gather is over at once.
        if next(moving, unit) is None:
            self.coming[unit.number] = moving

    def _wait(self, units: Sequence[int]) -> None:
        for number in units:
            moving = self.coming.pop(number, None)
            if moving is not None:
                self.tick(self._name(self.plan.units[number]))
                for _ in moving:
                    pass

    def _gathering(self, unit: Unit) -> Moving:
        for group in unit.groups:
            steps = self._members(group)
            if not moves_value(steps[0]):
                continue
            starts = [self._start(step) for step in steps]
            sizes = [self.bytes_of(step.tensor, step.chain[-1]) for step in steps]
            rooms = (
                [self.new(size, GATHERED) for size in sizes] if unit.mode is Mode.PER_PASS else []
            )
            made = yield from carried(self, starts, self._flat(group, back=False), rooms)
            self.values.update(
                ((step.tensor, step.chain[-1]), memory)
                for step, memory in zip(steps, made, strict=True)
            )
            for memory in made:
                if memory != STORED:
                    self.what[memory] = GATHERED
            for memory in starts:  # held until all has come
                self.read(memory)

    def _start(self, step: Redistribute) -> int:
        """The start of a chain: another chain's result, or the shard, cast if its type differs."""
        place = step.tensor, step.chain[0]
        start = (
            self.values.get(place)
            if place[1] != self.program.assignment.storage[step.tensor]
            else None
        )
        if start is None:
            start = (
                self.new(self.bytes_of(step.tensor, step.chain[0]))
                if self.types.casts(self.tensors[step.tensor])
                else STORED
            )
        return start

    def _release(self, unit: Unit) -> None:
        self._wait([unit.number])
        for step in self._members(unit.members):
            memory = self.values.pop((step.tensor, step.chain[-1]), STORED)
            self.read(memory)
            # Its storage is freed, although autograd still refers to the tensor.
            if unit.mode is Mode.PER_PASS and memory != STORED:
                self.closed.add(memory)

    def _reduce(self, unit: Unit, *, last: bool) -> None:
        self.tick(self._name(unit))
        followers = self.followers.get(unit.number, ())
        for going in self.going:
            if going.unit in followers:
                self._complete(going)
            elif going.left or not going.rests:
                self._go_on(going)
        self.going = [going for going in self.going if not going.ended]
        self.tick(self._name(unit))
        issued = sum(
            1
            for c in reduce_collectives(self.program, unit, self.types, last=last)
            if degree_of(c.axes, self.mesh) > 1
        )
        self.going.append(
            Going(unit.number, self._reducing(unit, last=last), issued, last and bool(unit.buckets))
        )
        self._go_on(self.going[-1])

    def _go_on(self, going: Going) -> None:
        if next(going.moving, self) is None:
            going.left -= 1
        else:
            going.ended = True

    def _complete(self, going: Going) -> None:
        for _ in going.moving:
            going.left -= 1
        going.ended = True

    def _reducing(self, unit: Unit, *, last: bool) -> Moving:
        for group in reversed(unit.groups) if last or unit.mode is not Mode.ONCE else ():
            steps = self._members(group)
            if steps[0].gradient and not only_casts(steps[0]):
                shares = [self._taken((step.tensor, step.chain[-1])) for step in steps]
                home = yield from carried(self, shares, self._flat(group, back=True))
                self._bring(
                    [
                        ((step.tensor, step.chain[0]), gradient)
                        for step, gradient in zip(steps, home, strict=True)
                    ]
                )
        for bucket in unit.buckets if last else ():
            places = [(name, self.program.assignment.storage[name]) for name in bucket.parameters]
            sums = [self._taken(place) for place in places]
            for axes in bucket.sums:
                if degree_of(axes, self.mesh) > 1:
                    for memory in sums:
                        self.read(memory)
                    sums = [self.new(self.size[memory], BUFFER) for memory in sums]
                    yield
            self.home.update(zip(places, sums, strict=True))

    def _taken(self, place: Place) -> int:
        """The gradient at a place, which is there no longer; zeros where there is none."""
        self.own.discard(place)
        gradient = self.home.pop(place, None)
        return self.new(self.gradient_bytes(*place)) if gradient is None else gradient

    # --- flat messages ---

    def _flat(self, group: tuple[int, ...], *, back: bool) -> list[FlatStep]:
        if (group, back) not in self.flat:
            self.flat[group, back] = flat_steps(self.plan, group, back=back)
        return self.flat[group, back]

    def _members(self, members: Sequence[int]) -> list[Redistribute]:
        return [
            step for index in members if isinstance(step := self.program.steps[index], Redistribute)
        ]

    def _name(self, unit: Unit) -> str:
        return self._members(unit.members)[0].tensor

    def _end(self) -> None:
        """Finish the step: gradients are complete; outputs and values made once live until here."""
        self.tick("")
        for going in self.going:
            self._complete(going)
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
