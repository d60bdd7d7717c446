"""The timeline of a step on one rank: compute and communication on streams of their own, each in order of issue.

A task starts when its stream is free and what it waits for has ended. The computation is one stream, the collectives of each mesh axis
another (a process group has a stream). What the runtime does: a redistribution waits for the computation before it and stops the one after
it; gradient buckets start under the backward pass and are waited for at its end; ring attention sends a block while it attends to one.
`Overlap` names what other frameworks hide besides.

    step = forward + backward + update + communication - hidden

Under a schedule (see `sharding.scheduled`) the program is that of one micro-batch, and played for each; all between the second and the last
take the same time, which is added up rather than played. Gradients are added to those before with three passes over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autopar.ir import Role
from autopar.order.scheduled import Mode, Part, Scheduled, makes, scheduled
from autopar.sharding.layout import Layout
from autopar.sharding.program import Bucket, Collective, Compute, Program, Redistribute, chain_collectives, operator_collectives
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.schedule import PLAIN, Schedule

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
    """Which communication runs under computation.

    `gradients`: the all-reduce of gradient buckets, under the backward pass (PyTorch's DistributedDataParallel, and this runtime).
    `weight_gradients`: what a layer's input gradient has to be sent for, under the product of its weight gradient (Megatron since 2022).
    `prefetch`: gathers of stored shards before they are used, and the reduce-scatter of their gradients (FullyShardedDataParallel).
    `slowdown`: how much longer computation takes while anything is sent.
    """

    gradients: bool = True
    weight_gradients: bool = False
    prefetch: bool = False
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
    return _Player(scheduled(program, schedule), prices, seconds, gradients, overlap or Overlap()).play(update)


class _Player:
    """Issues the tasks of a program in the runtime's order."""

    def __init__(
        self, plan: Scheduled, prices: MeshPrices, seconds: Callable[[Compute], Seconds], gradients: frozenset[str], overlap: Overlap
    ) -> None:
        self.plan, self.prices, self.seconds_of, self.gradients, self.overlap = plan, prices, seconds, gradients, overlap
        self.program = program = plan.program
        self.graph, self.mesh = program.graph, prices.mesh.shape
        self.streams = tuple(axis.name for axis in prices.mesh.axes)
        self.clock = Clock(overlap.slowdown)
        self.known: dict[tuple[str, int, int], float] = {}
        self.inside: dict[str, tuple[list[Collective], list[Collective]]] = {}
        moves = ((index, step) for index, step in enumerate(program.steps) if isinstance(step, Redistribute))
        self.chains = {index: chain_collectives(self.graph, step, self.mesh) for index, step in moves}
        self.made_by = {makes(program.steps[index])[0]: index for index in plan.modes}
        self.late: dict[tuple[str, Layout], list[tuple[Compute, float]]] = {}  # weight gradients that wait for a place's collective

    def play(self, update: float) -> Timeline:
        clock, count = self.clock, self.plan.schedule.micro_batches
        accumulation = self._accumulation() if count > 1 and self.gradients else 0.0
        number = 0
        while number < count:
            start, spent, sent = clock.now, dict(clock.spent), len(clock.sent)
            self._micro_batch(first=number == 0, last=number == count - 1)
            if number:
                clock.compute("gradients", "accumulation", accumulation)
            number += 1
            if number == PLAYED - 1 and count > PLAYED:
                left = count - PLAYED
                clock.skip(
                    left * (clock.now - start), {p: left * (clock.spent[p] - spent[p]) for p in spent}, left * math.fsum(clock.sent[sent:])
                )
                number = count - 1
        clock.phase = "update"
        clock.compute("optimizer", "update", update)
        spent = clock.spent
        return Timeline(
            forward=spent["forward"],
            backward=spent["backward"],
            update=spent["update"],
            communication=math.fsum(clock.sent),
            step=max([clock.now, *clock.free.values()]),
            events=tuple(clock.events),
        )

    def _micro_batch(self, *, first: bool, last: bool) -> None:
        clock = self.clock
        clock.phase = "forward"
        order = [index for part in self.plan.parts for index in part.steps]
        moves = [index for index in order if index in self.chains and (first or self._each_time(index))]
        gathered = {index: self._gather(index) for index in moves}
        for index in order:
            step = self.program.steps[index]
            if isinstance(step, Compute):
                self._forward(step)
            elif index in gathered:
                end = gathered[index]
                if end is None:
                    self._blocking(self.chains[index][0])
                else:
                    clock.wait(end)
        clock.phase = "backward"
        self._backward_pass(last=last)

    def _each_time(self, index: int) -> bool:
        """Whether a redistribution runs in every forward pass."""
        return self.plan.modes.get(index, Mode.AGAIN) is Mode.AGAIN

    def _accumulation(self) -> float:
        """Seconds of adding a micro-batch's gradients to those before, each where it is added up."""
        once = {
            step.tensor: step.chain[-1]
            for index, step in enumerate(self.program.steps)
            if isinstance(step, Redistribute) and self.plan.modes.get(index) is Mode.ONCE
        }
        storage, device = self.program.assignment.storage, self.prices.cluster.device
        trained = [tensor for tensor in self.graph.parameters if tensor.name in self.gradients]
        sizes = [local_bytes(once.get(t.name, storage[t.name]), t.bytes, self.mesh) for t in trained]
        return float(with_launch(0.0, memory_seconds(3 * np.array(sizes), device), device).sum()) if sizes else 0.0

    # --- forward ---

    def _gather(self, index: int) -> float | None:
        """The end of a parameter's gather that is prefetched, one after the other on a stream of their own; None for what is not."""
        if not self.overlap.prefetch or index not in self.plan.modes:
            return None
        end = 0.0
        for collective in self.chains[index][0]:
            end = self._issue(collective, end, " prefetch")
        return end

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

    # --- backward ---

    def _backward_pass(self, *, last: bool) -> None:
        steps, buckets = self.program.steps, self.program.buckets if last else ()
        order = [index for part in self.plan.parts for index in part.steps]
        first = {
            s.tensor: i
            for i, s in reversed([(i, steps[index]) for i, index in enumerate(order)])
            if isinstance(s, Redistribute) and s.bucketed
        }
        waiting = [max((len(steps) - first[p] for p in bucket.parameters if p in first), default=0) for bucket in buckets]
        places = self._places()
        sums: list[float] = []
        done = 0
        for part in reversed(self.plan.parts):
            if part.again and self.gradients:
                self._again(part)
            for index in reversed(part.steps):
                done += 1
                step = steps[index]
                if isinstance(step, Redistribute):
                    if last or self.plan.modes.get(index, Mode.AGAIN) is not Mode.ONCE:
                        self._backward_move(step, self.chains[index][1])
                else:
                    for gather in self.plan.regathered.get(index, ()):
                        self._regather(gather)
                    self._backward(step, places)
                while self.overlap.gradients and not self.late and len(sums) < len(buckets) and waiting[len(sums)] <= done:
                    sums.append(self._start(len(sums)))
        sums += [self._start(number) for number in range(len(sums), len(buckets))]
        for bucket, end in zip(buckets, sums, strict=True):
            self.clock.wait(end)
            for axis in bucket.axes[1:]:
                self._blocking([self._sum(bucket.nbytes, axis, bucket.parameters[0])])
            self._copy(bucket, "write gradients back")
        self.clock.wait(max(self.clock.free.values(), default=0.0))

    def _again(self, part: Part) -> None:
        """The second forward pass of what is not kept."""
        for index in part.steps:
            step = self.program.steps[index]
            if isinstance(step, Compute):
                self._forward(step)
            else:
                self._blocking(self.chains[index][0])

    def _regather(self, index: int) -> None:
        """A gathered parameter once more, from what is stored."""
        step = self.program.steps[index]
        assert isinstance(step, Redistribute)
        before = self.made_by.get((step.tensor, step.chain[0]))
        if before is not None:
            self._regather(before)
        self._blocking(self.chains[index][0])

    def _places(self) -> set[tuple[str, Layout]]:
        """What redistributions give whose gradient is communicated: their readers' weight gradients may be made meanwhile."""
        if not self.overlap.weight_gradients:
            return set()
        return {
            place
            for index, (_, back) in self.chains.items()
            if back and index not in self.plan.modes
            for place in makes(self.program.steps[index])
        }

    def _backward_move(self, step: Redistribute, back: list[Collective]) -> None:
        start = self.clock.now
        end = start
        for collective in reversed(back):
            end = self._issue(collective, end)
        for late, seconds in self.late.pop((step.tensor, step.chain[-1]), ()):
            self.clock.compute(late.operator.name, f"{late.operator.kind} weight gradient", seconds)
        if not (self.overlap.prefetch and self.graph.tensors[step.tensor].role is Role.PARAMETER):
            self.clock.wait(end)

    def _backward(self, step: Compute, places: set[tuple[str, Layout]]) -> None:
        clock, name, kind = self.clock, step.operator.name, step.operator.kind
        seconds = self.seconds_of(step)
        back = self._inside(step)[1]
        if _is_ring(step, back):
            self._backward_ring(step, back, seconds.backward)
            return
        self._blocking(back)
        place = None
        if places and seconds.weight:
            place = next((p for p in zip(step.operator.inputs, step.decision.inputs, strict=True) if p in places), None)
        if place is not None:
            clock.compute(name, kind, seconds.backward - seconds.weight)
            self.late.setdefault(place, []).append((step, seconds.weight))
        else:
            clock.compute(name, kind, seconds.backward)

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

    def _start(self, number: int) -> float:
        bucket = self.program.buckets[number]
        self._copy(bucket, "flatten gradients")
        return self._issue(self._sum(bucket.nbytes, bucket.axes[0], bucket.parameters[0]), self.clock.now) if bucket.axes else 0.0

    def _copy(self, bucket: Bucket, what: str) -> None:
        """Every gradient is read and written once on its way into a bucket, and once on its way out."""
        self.clock.compute(bucket.parameters[0], what, float(memory_seconds(2 * bucket.nbytes, self.prices.cluster.device)))

    def _sum(self, nbytes: int, axis: int, name: str) -> Collective:
        return Collective(phase="backward", kind="all_reduce", axis=axis, nbytes=nbytes, tensor=name)

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

    def _issue(self, collective: Collective, after: float, stream: str = "") -> float:
        key = (collective.kind, collective.axis, collective.nbytes)
        if key not in self.known:
            self.known[key] = self.prices.seconds(*key)
        return self.clock.send(collective.tensor, collective.kind, self.streams[collective.axis] + stream, self.known[key], after)


def _is_ring(step: Compute, inside: list[Collective]) -> bool:
    """Whether an operator computes while it sends around a ring."""
    return bool(inside) and all(c.kind == "send" for c in inside) and any(o.communication == "ring" for o in step.decision.options)
