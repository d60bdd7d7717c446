"""Plays the actions of a step's order on streams, as the runtime issues them.

The computation is one stream, the collectives of each mesh axis another (a process group has a stream). A task starts when its stream is
free and what it waits for has ended:

    a redistribution    of values waits for the computation before it, and stops the one after it
    a unit's gather     begins with the first collective of its first group; the others follow one by one when a segment needs the unit,
                        which waits for them. Its shards are copied into the message and out of it
    a unit's reduction  begins in the same way, and goes one collective on whenever another one begins; the end of the step waits for all
    ring attention      sends a block while it attends to one

Gradients are added to those of the micro-batches before with three passes over them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.order.actions import Action, Word
from autopar.order.passes import phases
from autopar.order.places import moves_value
from autopar.order.scheduled import Mode, Scheduled, Segment
from autopar.order.units import Unit
from autopar.sharding.program import Collective, Compute, Redistribute, chain_collectives, operator_collectives

from .casts import adding_seconds, gradient_seconds, unit_seconds
from .compute import memory_seconds, with_launch
from .flat import FlatStep, flat_steps
from .pricing import MeshPrices
from .shared_link import Sent
from .streams import Clock


class Seconds(NamedTuple):
    """Seconds of an operator; `weight` is the part of `backward` that makes the gradients of parameters."""

    forward: float
    backward: float
    weight: float = 0.0


@dataclass(slots=True)
class _Moving:
    """A chain of a unit under way: when the collective at hand ends (None: it is over), and what comes behind it.

    `phase`: in which it was begun. `rests`: the last one is a sum in place, for which nobody waits before the end of the step.
    """

    unit: int
    steps: Iterator[Sent]
    until: Sent | None
    left: int
    phase: str
    rests: bool = False


class Player:
    """Issues the tasks of a step on the streams of `clock`; `hides`: reductions of gradients run under the backward pass."""

    def __init__(self, plan: Scheduled, prices: MeshPrices, seconds: Callable[[Compute], Seconds], clock: Clock, *, hides: bool) -> None:
        self.plan, self.prices, self.seconds_of, self.clock, self.hides = plan, prices, seconds, clock, hides
        self.program, self.graph, self.mesh = plan.program, plan.program.graph, prices.mesh.shape
        self.gradients = plan.program.assignment.gradients
        self.streams = tuple(axis.name for axis in prices.mesh.axes)
        self.known: dict[tuple[str, int, int], float] = {}
        self.inside: dict[str, tuple[list[Collective], list[Collective]]] = {}
        self.chains = {
            index: chain_collectives(self.graph, step, self.mesh)
            for index, step in enumerate(plan.program.steps)
            if isinstance(step, Redistribute) and index not in plan.modes
        }
        self.flat: dict[tuple[tuple[int, ...], bool], list[FlatStep]] = {}
        self.casts = unit_seconds(plan, prices.cluster)
        self.followers = plan.followers()
        self.coming: dict[int, _Moving] = {}
        self.going: list[_Moving] = []

    def play(self, count: int) -> None:
        """A step of `count` micro-batches; those that the plan's schedule leaves out take as long as the last but one that it has."""
        clock, played = self.clock, self.plan.schedule.micro_batches
        accumulation = adding_seconds(self.plan, self.gradients, self.prices.cluster) if count > 1 else 0.0
        cast, _ = gradient_seconds(self.plan, self.gradients, self.prices.cluster)
        for number, actions in enumerate(self._micro_batches()):
            start, spent, sent = clock.now, dict(clock.spent), len(clock.sent)
            for action, clock.phase in actions:
                self._do(action)
            clock.compute("gradients", "cast", cast)
            if number:
                clock.compute("gradients", "accumulation", accumulation)
            if number == played - 2 and count > played:
                more, left = clock.now - start, count - played
                clock.skip(left * more, {p: left * (clock.spent[p] - spent[p]) for p in spent}, left * math.fsum(clock.sent[sent:]))
        for moving in self.going:
            self._finish(moving)
        clock.wait(max(clock.free.values(), default=0.0))

    def _micro_batches(self) -> Iterator[list[tuple[Action, str]]]:
        """The actions of each micro-batch, up to the first of the next one, with their phases."""
        actions = self.plan.actions()
        number = 0

        def micro_batch(pair: tuple[Action, str]) -> int:
            nonlocal number
            number = max(number, pair[0].micro_batch or 0) if pair[0].word is Word.FORWARD else number
            return number

        return (list(group) for _, group in itertools.groupby(zip(actions, phases(actions), strict=True), micro_batch))

    def _do(self, action: Action) -> None:
        segments, units = self.plan.segments, self.plan.units
        match action.word:
            case Word.GATHER:
                assert action.unit is not None
                self.coming[action.unit] = self._begun(action.unit, self._gathering(units[action.unit]))
            case Word.RELEASE:
                assert action.unit is not None
                self._wait([action.unit])
            case Word.FORWARD:
                assert action.segment is not None
                self._wait(segments[action.segment].units)
                self._forward_pass(segments[action.segment])
            case Word.BACKWARD:
                assert action.segment is not None
                self._wait(segments[action.segment].wanted)
                self._backward_pass(segments[action.segment])
            case Word.REDUCE:
                assert action.unit is not None
                self._reduce(units[action.unit], last=action.micro_batch == self.plan.schedule.micro_batches - 1)

    def _traffic(self, nbytes: Sequence[float]) -> float:
        """Seconds of kernels that each read and write so many bytes."""
        device = self.prices.cluster.device
        return float(with_launch(0.0, memory_seconds(np.array(nbytes), device), device).sum()) if nbytes else 0.0

    # --- units ---

    def _gathering(self, unit: Unit) -> Iterator[Sent]:
        self.clock.compute(f"unit {unit.number}", "cast parameters", self.casts.get(unit.number, 0.0))
        for group in unit.groups:
            first = self.program.steps[group[0]]
            assert isinstance(first, Redistribute)
            if moves_value(first):
                for step in self._flat(group, back=False):
                    yield from self._sent(step, first.tensor)

    def _reducing(self, unit: Unit, *, last: bool) -> Iterator[Sent]:
        for group in reversed(unit.groups) if last or unit.mode is not Mode.ONCE else ():
            first = self.program.steps[group[0]]
            assert isinstance(first, Redistribute)
            for step in self._flat(group, back=True) if first.gradient else ():
                yield from self._sent(step, first.tensor)
        for bucket in unit.buckets if last else ():
            for axis in bucket.axes:
                if self.mesh[axis] > 1:
                    self.clock.compute(bucket.parameters[0], "flatten", self._traffic([2.0 * bucket.nbytes]))
                    yield self._issue("all_reduce", axis, bucket.nbytes, bucket.parameters[0])

    def _sent(self, step: FlatStep, name: str) -> Iterator[Sent]:
        """One step of a flat chain, with the copies into the message and out of it."""
        if step.kind:
            self.clock.compute(name, "flatten", self._traffic([step.traffic]))
            yield self._issue(step.kind, step.axis, step.nbytes, name)
            self.clock.compute(name, "unflatten", self._traffic([2.0 * size for size in step.copied]))

    def _flat(self, group: tuple[int, ...], *, back: bool) -> list[FlatStep]:
        if (group, back) not in self.flat:
            self.flat[group, back] = flat_steps(self.plan, group, back=back)
        return self.flat[group, back]

    def _begun(self, unit: int, steps: Iterator[Sent], left: int = 0, *, rests: bool = False) -> _Moving:
        return _Moving(unit, steps, next(steps, None), left - 1, self.clock.phase, rests)

    def _go_on(self, moving: _Moving) -> None:
        if moving.until is not None:
            self.clock.wait(moving.until.end)
            now, self.clock.phase = self.clock.phase, moving.phase
            moving.until = next(moving.steps, None)
            self.clock.phase = now
            moving.left -= 1

    def _finish(self, moving: _Moving | None) -> None:
        while moving is not None and moving.until is not None:
            self._go_on(moving)

    def _wait(self, units: Sequence[int]) -> None:
        for unit in units:
            self._finish(self.coming.pop(unit, None))

    def _reduce(self, unit: Unit, *, last: bool) -> None:
        for moving in self.going:
            if moving.unit in self.followers.get(unit.number, ()):
                self._finish(moving)
            elif moving.left > 0 or not moving.rests:
                self._go_on(moving)
        steps = [s for g in unit.groups for s in self._flat(g, back=True) if s.kind] if last or unit.mode is not Mode.ONCE else []
        left = len(steps) + sum(self.mesh[axis] > 1 for bucket in unit.buckets for axis in bucket.axes if last)
        self.going.append(self._begun(unit.number, self._reducing(unit, last=last), left, rests=last and bool(unit.buckets)))
        if not self.hides:
            self._finish(self.going[-1])

    # --- passes ---

    def _forward_pass(self, segment: Segment) -> None:
        for index in segment.steps:
            step = self.program.steps[index]
            if isinstance(step, Compute):
                self._forward(step)
            else:
                self._blocking(self.chains[index][0])

    def _backward_pass(self, segment: Segment) -> None:
        if segment.again:
            self._forward_pass(segment)
        for index in reversed(segment.steps):
            step = self.program.steps[index]
            if isinstance(step, Compute):
                self._backward(step)
            else:
                self._blocking(self.chains[index][1][::-1])

    def _forward(self, step: Compute) -> None:
        clock, name, kind = self.clock, step.operator.name, step.operator.kind
        seconds = self.seconds_of(step).forward
        ahead = self._inside(step)[0]
        if not _is_ring(step, ahead):
            self._blocking(ahead)
            clock.compute(name, kind, seconds)
            return
        share = seconds / (len(ahead) + 1)
        for collective in ahead:
            coming = self._started(collective)
            clock.compute(name, kind, share)
            clock.wait(coming.end)
        clock.compute(name, kind, share)

    def _backward(self, step: Compute) -> None:
        seconds = self.seconds_of(step).backward
        back = self._inside(step)[1]
        if _is_ring(step, back):
            self._backward_ring(step, back, seconds)
            return
        self._blocking(back)
        self.clock.compute(step.operator.name, step.operator.kind, seconds)

    def _backward_ring(self, step: Compute, back: list[Collective], seconds: float) -> None:
        """Each round sends the next keys and values on, computes, and sends the gradients so far after them."""
        clock = self.clock
        rounds = (len(back) + 1) // 2
        travelling = coming = Sent(0.0, 0.0)
        for number in range(rounds):
            last = number == rounds - 1
            coming = coming if last else self._started(back[2 * number])
            clock.compute(step.operator.name, step.operator.kind, seconds / rounds)
            clock.wait(travelling.end)
            travelling = self._started(back[-1] if last else back[2 * number + 1])
            clock.wait(coming.end)
        clock.wait(travelling.end)

    # --- collectives ---

    def _inside(self, step: Compute) -> tuple[list[Collective], list[Collective]]:
        if not any(option.communication is not None for option in step.decision.options):
            return [], []
        name = step.operator.name
        if name not in self.inside:
            found = operator_collectives(self.graph, step, self.mesh, self.gradients)
            self.inside[name] = [c for c in found if c.phase == "forward"], [c for c in found if c.phase == "backward"]
        return self.inside[name]

    def _blocking(self, collectives: list[Collective]) -> None:
        for collective in collectives:
            self.clock.wait(self._started(collective).end)

    def _started(self, collective: Collective) -> Sent:
        return self._issue(collective.kind, collective.axis, collective.nbytes, collective.tensor)

    def _issue(self, kind: str, axis: int, nbytes: int, name: str) -> Sent:
        """Start a collective behind the computation so far."""
        key = (kind, axis, nbytes)
        if key not in self.known:
            self.known[key] = self.prices.seconds(*key)
        return self.clock.send(name, kind, self.streams[axis], self.known[key], self.clock.now)


def _is_ring(step: Compute, inside: list[Collective]) -> bool:
    """Whether an operator computes while it sends around a ring."""
    return bool(inside) and all(c.kind == "send" for c in inside) and any(o.communication == "ring" for o in step.decision.options)
