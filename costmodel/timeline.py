"""The timeline of a step on one rank: the actions of its order, played on streams, each in order of issue.

A task starts when its stream is free and what it waits for has ended. The computation is one stream, the collectives of each mesh axis
another (a process group has a stream). As the runtime has it: a redistribution of values waits for the computation before it and stops the
one after it; a unit of parameters is gathered under the segment before the one that reads it, and its gradients are reduced under what is
left of the backward pass; ring attention sends a block while it attends to one.

    step = forward + backward + update + communication - hidden

Under a schedule with micro-batches the program is that of one of them, and played for each; all between the second and the last take the
same time, which is added up rather than played. Gradients are added to those before with three passes over them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from autopar.order.actions import Action, Word
from autopar.order.scheduled import Mode, Scheduled, Segment, scheduled
from autopar.sharding.program import Collective, Compute, Program, Redistribute, chain_collectives, operator_collectives
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.schedule import PLAIN, Schedule

from .casts import gradient_seconds, unit_seconds
from .compute import memory_seconds, with_launch
from .pricing import MeshPrices
from .streams import Clock, Event

ROUNDING = 1e-12
PLAYED = 3
"""Micro-batches that are played: the first, one of those between, and the last."""
SLOWDOWN: Mapping[str, float] = {"nccl": 1.1256, "gloo": 1.0}
"""How much longer computation takes while a collective of the backend runs: on A100s as Galvatron's profiler measured it
(PKU-DAIR/Hetu-Galvatron@cea12ffb, galvatron/profile_hardware/hardware_configs/overlap_coefficient.json); for Gloo not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Which communication runs under computation: the reduction of `gradients`, and gathers of parameters by `prefetch`.

    `slowdown`: how much longer computation takes while anything is sent.
    """

    gradients: bool = True
    prefetch: bool = True
    slowdown: float = 1.0


class Seconds(NamedTuple):
    """Seconds of an operator; `weight` is the part of `backward` that makes the gradients of parameters."""

    forward: float
    backward: float
    weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Seconds of computation by phase, of all collectives, and of the step in which some of them are hidden."""

    forward: float
    backward: float
    update: float
    communication: float
    step: float
    events: tuple[Event, ...] = field(repr=False)

    @property
    def hidden(self) -> float:
        """Seconds of communication that do not lengthen the step."""
        hidden = self.forward + self.backward + self.update + self.communication - self.step
        return hidden if hidden > ROUNDING * self.step else 0.0


def step_timeline(
    program: Program,
    prices: MeshPrices,
    seconds: Callable[[Compute], Seconds],
    *,
    gradients: frozenset[str],
    update: float = 0.0,
    overlap: Overlap | None = None,
    schedule: Schedule = PLAIN,
) -> Timeline:
    """Play the program once forward and, for what `gradients` hold, once backward; then the optimizer computes for `update` seconds.

    Under a `schedule` with micro-batches it is the program of one of them.
    """
    played = replace(schedule, micro_batches=min(schedule.micro_batches, PLAYED))
    player = _Player(scheduled(program, played), prices, seconds, gradients, overlap or Overlap(), schedule.micro_batches)
    return player.play(update)


class _Player:
    """Issues the tasks of a program in the runtime's order."""

    def __init__(
        self,
        plan: Scheduled,
        prices: MeshPrices,
        seconds: Callable[[Compute], Seconds],
        gradients: frozenset[str],
        overlap: Overlap,
        micro_batches: int,
    ) -> None:
        self.plan, self.prices, self.seconds_of, self.gradients, self.overlap = plan, prices, seconds, gradients, overlap
        self.count, self.program = micro_batches, plan.program
        self.graph, self.mesh = plan.program.graph, prices.mesh.shape
        self.streams = tuple(axis.name for axis in prices.mesh.axes)
        self.clock = Clock(overlap.slowdown)
        self.known: dict[tuple[str, int, int], float] = {}
        self.inside: dict[str, tuple[list[Collective], list[Collective]]] = {}
        self.chains = {
            index: chain_collectives(self.graph, step, self.mesh)
            for index, step in enumerate(plan.program.steps)
            if isinstance(step, Redistribute) and index not in plan.modes
        }
        self.casts = unit_seconds(plan, prices.cluster)
        self.arrived: dict[int, float] = {}  # units on their way, and when they are there
        self.summed: list[float] = []

    def play(self, update: float) -> Timeline:
        clock = self.clock
        accumulation = self._accumulation() if self.count > 1 and self.gradients else 0.0
        cast, home = gradient_seconds(self.plan, self.gradients, self.prices.cluster)
        for number, actions in enumerate(self._micro_batches()):
            start, spent, sent = clock.now, dict(clock.spent), len(clock.sent)
            for action in actions:
                self._do(action)
            if cast:
                clock.compute("gradients", "cast", cast)
            if number:
                clock.compute("gradients", "accumulation", accumulation)
            if number == PLAYED - 2 and self.count > PLAYED:
                left = self.count - PLAYED
                clock.skip(
                    left * (clock.now - start), {p: left * (clock.spent[p] - spent[p]) for p in spent}, left * math.fsum(clock.sent[sent:])
                )
        for end in self.summed:
            clock.wait(end)
        clock.wait(max(clock.free.values(), default=0.0))
        clock.phase = "update"
        clock.compute("optimizer", "update", update + home)
        spent = clock.spent
        return Timeline(
            forward=spent["forward"],
            backward=spent["backward"],
            update=spent["update"],
            communication=math.fsum(clock.sent),
            step=max([clock.now, *clock.free.values()]),
            events=tuple(clock.events),
        )

    def _micro_batches(self) -> Iterator[list[Action]]:
        """The actions of each micro-batch: those up to the first of the next one."""
        prefetch = self.plan.schedule.prefetch if self.overlap.prefetch else 0
        plan = replace(self.plan, schedule=replace(self.plan.schedule, prefetch=prefetch))
        number = 0

        def micro_batch(action: Action) -> int:
            nonlocal number
            number = max(number, action.micro_batch or 0) if action.word is Word.FORWARD else number
            return number

        return (list(group) for _, group in itertools.groupby(plan.actions(), micro_batch))

    def _do(self, action: Action) -> None:
        clock, segments = self.clock, self.plan.segments
        match action.word:
            case Word.GATHER:
                assert action.unit is not None
                self._gather(action.unit, self.plan.issued(action))
            case Word.FORWARD:
                assert action.segment is not None
                clock.phase = "forward"
                self._wait(segments[action.segment].units)
                self._forward_pass(segments[action.segment])
            case Word.BACKWARD:
                assert action.segment is not None
                clock.phase = "backward"
                self._wait(segments[action.segment].wanted)
                self._backward_pass(segments[action.segment])
            case Word.REDUCE:
                self._reduce(action)

    def _accumulation(self) -> float:
        """Seconds of adding a micro-batch's gradients to those before, each where it is added up."""
        once = {
            step.tensor: step.chain[-1]
            for index, step in enumerate(self.program.steps)
            if isinstance(step, Redistribute) and self.plan.modes.get(index) is Mode.ONCE
        }
        storage, device = self.program.assignment.storage, self.prices.cluster.device
        trained = [tensor for tensor in self.graph.parameters if tensor.name in self.gradients]
        types = self.plan.schedule.types
        sizes = [local_bytes(once.get(t.name, storage[t.name]), types.reduced_bytes(t), self.mesh) for t in trained]
        return float(with_launch(0.0, memory_seconds(3 * np.array(sizes), device), device).sum()) if sizes else 0.0

    # --- units ---

    def _gather(self, unit: int, collectives: Sequence[Collective]) -> None:
        """The unit's values are cast, and on their way; each is read and written once more when it is there."""
        if unit in self.casts:
            self.clock.compute(f"unit {unit}", "cast parameters", self.casts[unit])
        end = self.clock.now
        for collective in collectives:
            end = self._issue(collective, end)
        self.arrived[unit] = end

    def _wait(self, units: Sequence[int]) -> None:
        for unit in units:
            if unit in self.arrived:
                self.clock.wait(self.arrived.pop(unit))

    def _reduce(self, action: Action) -> None:
        """Every gradient is read and written once on its way into the message of its group."""
        end = self.clock.now
        for collective in self.plan.issued(action):
            if end <= self.clock.now:
                seconds = float(memory_seconds(2 * collective.nbytes, self.prices.cluster.device))
                end = self.clock.compute(collective.tensor, "flatten gradients", seconds)
            end = self._issue(collective, end)
        if self.overlap.gradients:
            self.summed.append(end)
        else:
            self.clock.wait(end)

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
            coming = self._issue(collective, clock.now)
            clock.compute(name, kind, share)
            clock.wait(coming)
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
        travelling = 0.0
        for number in range(rounds):
            last = number == rounds - 1
            coming = 0.0 if last else self._issue(back[2 * number], clock.now)
            clock.compute(step.operator.name, step.operator.kind, seconds / rounds)
            clock.wait(travelling)
            travelling = self._issue(back[-1] if last else back[2 * number + 1], clock.now)
            clock.wait(coming)
        clock.wait(travelling)

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
            self.clock.wait(self._issue(collective, self.clock.now))

    def _issue(self, collective: Collective, after: float) -> float:
        key = (collective.kind, collective.axis, collective.nbytes)
        if key not in self.known:
            self.known[key] = self.prices.seconds(*key)
        return self.clock.send(collective.tensor, collective.kind, self.streams[collective.axis], self.known[key], after)


def _is_ring(step: Compute, inside: list[Collective]) -> bool:
    """Whether an operator computes while it sends around a ring."""
    return bool(inside) and all(c.kind == "send" for c in inside) and any(o.communication == "ring" for o in step.decision.options)
