"""The timeline of a step on one rank: compute and communication on streams of their own, each in order of issue.

A task starts when its stream is free and what it waits for has ended. The computation is one stream, the collectives of each mesh axis
another (a process group has a stream). What the runtime does: a redistribution waits for the computation before it and stops the one after
it; gradient buckets start under the backward pass and are waited for at its end; ring attention sends a block while it attends to one.
`Overlap` names what other frameworks hide besides.

    step = forward + backward + update + communication - hidden
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.ir import Role
from autopar.sharding.layout import Layout
from autopar.sharding.program import Bucket, Collective, Compute, Program, Redistribute, chain_collectives, operator_collectives

from .compute import memory_seconds
from .pricing import MeshPrices
from .streams import Clock, Event

ROUNDING = 1e-12
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
) -> Timeline:
    """Play the program once forward and, for what `gradients` hold, once backward; then the optimizer computes for `update` seconds."""
    return _Player(program, prices, seconds, gradients, overlap or Overlap()).play(update)


class _Player:
    """Issues the tasks of a program in the runtime's order."""

    def __init__(
        self, program: Program, prices: MeshPrices, seconds: Callable[[Compute], Seconds], gradients: frozenset[str], overlap: Overlap
    ) -> None:
        self.program, self.prices, self.seconds_of, self.gradients, self.overlap = program, prices, seconds, gradients, overlap
        self.graph, self.mesh = program.graph, prices.mesh.shape
        self.streams = tuple(axis.name for axis in prices.mesh.axes)
        self.clock = Clock(overlap.slowdown)
        self.known: dict[tuple[str, int, int], float] = {}
        self.inside: dict[str, tuple[list[Collective], list[Collective]]] = {}
        self.chains: list[tuple[list[Collective], list[Collective]]] = []
        self.late: dict[tuple[str, Layout], list[tuple[Compute, float]]] = {}  # weight gradients that wait for a place's collective

    def play(self, update: float) -> Timeline:
        clock = self.clock
        moves = [step for step in self.program.steps if isinstance(step, Redistribute)]
        self.chains = [chain_collectives(self.graph, step, self.mesh) for step in moves]
        gathered = [self._gather(step, ahead) for step, (ahead, _) in zip(moves, self.chains, strict=True)]
        waits = zip(gathered, (ahead for ahead, _ in self.chains), strict=True)
        for step in self.program.steps:
            if isinstance(step, Compute):
                self._forward(step)
                continue
            end, collectives = next(waits)
            if end is None:
                self._blocking(collectives)
            else:
                clock.wait(end)
        clock.phase = "backward"
        self._backward_pass()
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

    # --- forward ---

    def _gather(self, step: Redistribute, collectives: list[Collective]) -> float | None:
        """The end of a parameter's gather that is prefetched, one after the other on a stream of their own; None for what is not."""
        if not self.overlap.prefetch or self.graph.tensors[step.tensor].role is not Role.PARAMETER:
            return None
        end = 0.0
        for collective in collectives:
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

    def _backward_pass(self) -> None:
        steps, buckets = self.program.steps, self.program.buckets
        first = {s.tensor: i for i, s in reversed(list(enumerate(steps))) if isinstance(s, Redistribute) and s.bucketed}
        waiting = [max((len(steps) - first[p] for p in bucket.parameters if p in first), default=0) for bucket in buckets]
        places = self._places()
        chains = self.chains[::-1]
        sums: list[float] = []
        moved = 0
        for done, step in enumerate(reversed(steps), 1):
            if isinstance(step, Redistribute):
                self._backward_move(step, chains[moved][1])
                moved += 1
            else:
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

    def _places(self) -> set[tuple[str, Layout]]:
        """What redistributions give whose gradient is communicated: their readers' weight gradients may be made meanwhile."""
        if not self.overlap.weight_gradients:
            return set()
        moves = (step for step in self.program.steps if isinstance(step, Redistribute))
        return {
            (step.tensor, step.chain[-1])
            for step, (_, back) in zip(moves, self.chains, strict=True)
            if back and self.graph.tensors[step.tensor].role is not Role.PARAMETER
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
