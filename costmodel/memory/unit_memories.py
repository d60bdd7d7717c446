"""The memories of units of parameters while a step runs: gathers, releases and reductions.

A gather holds its flat message along with the values until the first segment reads them. A
reduction holds its message until the round behind its last collective, or until the step ends; a
sum in place is the gradient itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial

from autopar.ir import Role
from autopar.order.scheduled import Mode, Scheduled
from autopar.order.unit_collectives import Chain, scale_messages
from autopar.order.unit_travel import UnitTravel
from autopar.order.units import Unit
from autopar.sharding.mesh import degree_of
from autopar.sharding.program import Redistribute, moves_value

from .flat_messages import FlatStep, Moving, carried, flat_steps
from .live_bytes import BUFFER, CLOSED, GATHERED, GRADIENT, MISSING, STORED
from .saved_values import Facts
from .step_memories import Steps
from .step_script import Habits


class UnitMemories(Steps):
    """The memories of a plan's units.

    `values`: gathered parameters. `home`: gradients of parameters, stored or on their way there, by
    the numbers of places. `behind`: gradients of values, until the segment that made the value
    takes them. `own`: the places of gradients that are sums in memory of their own. `alike`: by the
    place of a cast, the places whose values are the same memory, although gradients differ.
    """

    def __init__(self, plan: Scheduled, facts: Mapping[str, Facts], habits: Habits) -> None:
        super().__init__(plan.program, facts, plan.schedule.types, habits)
        self.plan = plan
        self.behind: dict[int, int] = {}
        self.home: dict[int, int] = {}
        self.own: set[int] = set()
        self.flat: dict[tuple[tuple[int, ...], bool], list[FlatStep]] = {}
        self.travel: UnitTravel[Moving] = UnitTravel(plan)
        self.alike: dict[int, list[int]] = {}
        for step in self._members(range(len(plan.program.steps))):
            if self.tensors[step.tensor].role is Role.PARAMETER and not moves_value(step):
                cast = self.steps.number((step.tensor, step.chain[0]))
                same = self.steps.number((step.tensor, step.chain[-1]))
                self.alike.setdefault(cast, []).append(same)

    def bring(self, gradients: Sequence[tuple[int, int]], *, made: bool = False) -> None:
        """Add each gradient to earlier ones, in place if nothing else holds them.

        All are held until the last is added. `made`: gradients of a backward pass, which are cast
        to the type in which they travel.
        """
        for place, gradient in gradients:
            name, layout = self.places[place]
            parameter = self.tensors[name].role is Role.PARAMETER
            if made and parameter and self.steps.is_cast(name):
                self.tick(name)
                self.read(gradient)
                gradient = self.new(self.steps.gradient_bytes(name, layout))
            held = self.home if parameter else self.behind
            before = held.get(place)
            if before is None:
                total = gradient
            else:
                self.tick(name)
                self.read(before)
                # The first gradient may be held elsewhere, so the first sum is made in new memory.
                total = before if place in self.own else self.new(self.size[before])
                if parameter:
                    self.own.add(place)
            held[place] = total
            if parameter:
                self.mark(total, GRADIENT)
        for _, gradient in gradients:
            self.read(gradient)

    def gather(self, unit: Unit, number: int) -> None:
        self.tick(self._name(unit))
        self.travel.gather(unit.number, number, lambda chain: Moving(self._gathering(unit, chain)))

    def wait(self, units: Sequence[int]) -> None:
        """Wait for gathers, each in a moment of its own."""
        for number in units:
            if self.travel.is_coming(number):
                self.tick(self._name(self.plan.units[number]))
                self.travel.wait([number])

    def _gathering(self, unit: Unit, chain: Chain) -> Generator[None, None, None]:
        steps = self._members(chain.group)
        starts = [self._start(step) for step in steps]
        sizes = [self.steps.bytes_of(step.tensor, step.chain[-1]) for step in steps]
        # Scales are small: their messages take time, but hardly any memory.
        for _ in scale_messages(self.program, chain.group):
            yield
        rooms = partial(self._rooms, sizes) if unit.mode is Mode.PER_PASS else None
        made = yield from carried(self, starts, self._flat(chain.group, back=False), rooms)
        for step, memory in zip(steps, made, strict=True):
            place = self.steps.number((step.tensor, step.chain[-1]))
            for same in (place, *self.alike.get(place, ())):
                self.values[same] = memory
            if memory != STORED:
                self.mark(memory, GATHERED)
        for memory in starts:  # held until all has come
            self.read(memory)

    def _rooms(self, sizes: Sequence[float]) -> list[int]:
        return [self.new(size, GATHERED) for size in sizes]

    def _start(self, step: Redistribute) -> int:
        """The start of a chain: another chain's result, or the shard, cast if its type differs."""
        name = step.tensor
        layout = step.chain[0]
        if layout != self.program.assignment.storage[name]:
            start = self.values[self.steps.number((name, layout))]
            if start != MISSING:
                return start
        if not self.types.casts(self.tensors[name]):
            return STORED
        return self.new(self.steps.bytes_of(name, layout), BUFFER)

    def release(self, unit: Unit) -> None:
        self.wait([unit.number])
        for step in self._members(unit.members):
            place = self.steps.number((step.tensor, step.chain[-1]))
            memory = self.values[place]
            self.values[place] = MISSING
            if memory >= 0:
                self.read(memory)
                # Its storage is freed, although autograd still refers to the tensor.
                if unit.mode is Mode.PER_PASS and self.memories.kind[memory] < CLOSED:
                    self.memories.kind[memory] += CLOSED

    def reduce(self, unit: Unit, number: int, micro_batch: int, *, last: bool) -> None:
        self.tick(self._name(unit))
        self.travel.reduce(
            unit.number,
            number,
            micro_batch,
            last=last,
            begin=lambda chain: Moving(
                self._reducing(chain) if chain.group else self._summing(chain)
            ),
        )

    def _reducing(self, chain: Chain) -> Generator[None, None, None]:
        steps = self._members(chain.group)
        if not steps[0].gradient:
            return
        number = self.steps.number
        shares = [self._taken(number((step.tensor, step.chain[-1]))) for step in steps]
        home = yield from carried(self, shares, self._flat(chain.group, back=True))
        self.bring(
            [
                (number((step.tensor, step.chain[0])), gradient)
                for step, gradient in zip(steps, home, strict=True)
            ]
        )

    def _summing(self, chain: Chain) -> Generator[None, None, None]:
        # The second factors of low-rank gradients are part of the first ones' bucket.
        bucket = chain.buckets[0]
        storage = self.program.assignment.storage
        places = [self.steps.number((name, storage[name])) for name in bucket.parameters]
        sums = [self._taken(place) for place in places]
        for axes in itertools.chain.from_iterable(one.sums for one in chain.buckets):
            if degree_of(axes, self.mesh) > 1:
                for memory in sums:
                    self.read(memory)
                sums = [self.new(self.size[memory], BUFFER) for memory in sums]
                yield
        self.home.update(zip(places, sums, strict=True))

    def _taken(self, place: int) -> int:
        """The gradient at a place, which is there no longer; zeros where there is none."""
        self.own.discard(place)
        gradient = self.home.pop(place, None)
        if gradient is not None:
            return gradient
        return self.new(self.steps.gradient_bytes(*self.places[place]))

    # --- flat messages ---

    def _flat(self, group: tuple[int, ...], *, back: bool) -> list[FlatStep]:
        if (group, back) not in self.flat:
            self.flat[group, back] = flat_steps(self.plan, group, back=back)
        return self.flat[group, back]

    def _members(self, members: Iterable[int]) -> list[Redistribute]:
        return [
            step for index in members if isinstance(step := self.program.steps[index], Redistribute)
        ]

    def _name(self, unit: Unit) -> str:
        return self._members(unit.members)[0].tensor
