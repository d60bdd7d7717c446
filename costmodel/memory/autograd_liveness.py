"""Bytes alive at every moment of a training step, as autograd runs it.

The program is walked forward, then backward. A memory is alive from the moment that makes it to the
last one that reads it. A saved value is read by its keeper's backward moment. Gradients of a value
with several readers add up in place. live(t) is the sum of the sizes of all memories alive at t;
the peak is its maximum. A recomputed segment keeps only its inputs, and is walked again before its
backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir import Role
from autopar.order.scheduled import scheduled
from autopar.sharding.mesh import degree_of
from autopar.sharding.program import Compute, Program, Redistribute
from autopar.sharding.schedule import PLAIN, Types

from .live_bytes import BUFFER, GRADIENT, STORED, Live
from .redistribution_memory import Action
from .saved_values import Facts
from .step_memories import Place, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Groups of operators, by name, whose values are recomputed in the backward pass.

    They are recomputed group by group, and not saved. `discarded`: further operators, whose results
    are given up after use and made again from their first input where the backward pass reads them.
    """

    segments: tuple[tuple[str, ...], ...] = ()
    discarded: frozenset[str] = frozenset()


NO_RECOMPUTE = Recompute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Autograd:
    """The passes of a training loop of plain autograd.

    `accumulating`: gradients are added to permanent buffers. `regather`: of gathered values only
    the shard is kept, and they are gathered again in the backward pass (parameters: ZeRO-3;
    activations: Megatron's sequence parallelism). `units`: the same of parameters alone. `types`:
    of gradients, and of stored parameters, whose casts are counted apart.
    """

    train: bool = True
    recompute: Recompute = NO_RECOMPUTE
    accumulating: bool = False
    regather: bool = False
    units: bool = False
    types: Types = PLAIN.types


AUTOGRAD = Autograd()


def live_bytes(program: Program, facts: Mapping[str, Facts], passes: Autograd) -> Live:
    """Walk a program once, as autograd runs it (`runtime_liveness`: as the runtime does)."""
    walk = _Walk(program, facts, passes)
    walk.forward(passes.train)
    if passes.train:
        walk.backward()
    return walk.live(accumulating=passes.accumulating)


class _Walk(Steps):
    """A whole pass forward, then one backward."""

    def __init__(self, program: Program, facts: Mapping[str, Facts], passes: Autograd) -> None:
        super().__init__(program, facts, passes.types)
        self.accumulating = passes.accumulating
        self.regather = passes.regather
        self.units = passes.units
        # A value that is gathered or made again when it is read → what it comes from.
        self.shard: dict[int, int] = {}
        self.discarded = passes.recompute.discarded
        self.ready: dict[str, int] = {}  # parameter → the moment at which its gradient is complete
        self.stored = {(name, layout) for name, layout in program.assignment.storage.items()}
        self.segment_of = self._segments(passes.recompute)
        self.began: dict[int, int] = {}
        self.boundary: dict[int, set[int]] = {}

    # --- forward ---

    def _segments(self, recompute: Recompute) -> list[int]:
        """The segment of every step, or -1."""
        names = {
            name: number for number, segment in enumerate(recompute.segments) for name in segment
        }
        return [names.get(name, -1) for name in self.workers]

    def forward(self, train: bool) -> None:
        for index, step in enumerate(self.program.steps):
            self.run(index, step, self.values, keep=train and self.segment_of[index] < 0)
        for place in self.program.assignment.outputs.items():
            if place[0] != self.program.graph.loss:
                self.read(self.value(place, self.values))
        self.forward_end = self.now

    def run(
        self, index: int, step: Compute | Redistribute, values: dict[Place, int], *, keep: bool
    ) -> None:
        """Run one step of the forward pass; `keep`: whether values are saved for autograd."""
        self.tick(self.workers[index])
        segment = -1 if keep else self.segment_of[index]
        if isinstance(step, Redistribute):
            self.enter(segment, [(step.tensor, step.chain[0])], values)
            self.redistribute(step, values)
        else:
            self.enter(
                segment, list(zip(step.operator.inputs, step.decision.inputs, strict=True)), values
            )
            self.compute(index, step, values, keep=keep)

    def enter(self, segment: int, places: Sequence[Place], values: dict[Place, int]) -> None:
        """Keep a segment's outside inputs alive until its backward pass ends."""
        if segment >= 0:
            began = self.began.setdefault(segment, self.now)
            memories = (self.value(place, values) for place in places)
            for memory in [m for m in memories if m != STORED and self.birth[m] < began]:
                self.boundary.setdefault(segment, set()).add(memory)
                self.keeper.setdefault(memory, self.moments[self.now])

    def compute(self, index: int, step: Compute, values: dict[Place, int], *, keep: bool) -> None:
        super().compute(index, step, values, keep=keep)
        operator = step.operator
        if operator.name in self.discarded:
            source = self.value((operator.inputs[0], step.decision.inputs[0]), values)
            for place in zip(operator.outputs, step.decision.outputs, strict=True):
                made = self.value(place, values)
                # A view is the memory of its source.
                if made != source:
                    self.shard[made] = source

    def gathered(self, name: str, made: int, memory: int, ahead: Action) -> None:
        if ahead.gathers and (
            self.regather or (self.units and self.tensors[name].role is Role.PARAMETER)
        ):
            self.shard[made] = memory

    # --- backward ---

    def backward(self) -> None:
        graph = self.program.graph
        if graph.loss is not None:
            self.add(
                (graph.loss, self.program.assignment.outputs[graph.loss]),
                self.new(self.tensors[graph.loss].bytes),
            )
        recomputed: set[int] = set()
        steps = self.program.steps
        last: dict[int, int] = {}
        for index, segment in enumerate(self.segment_of):
            # Backward, a segment ends with its first step.
            last.setdefault(segment, index)
        for index in reversed(range(len(steps))):
            segment = self.segment_of[index]
            step = steps[index]
            if segment >= 0 and segment not in recomputed:
                recomputed.add(segment)
                self.recompute(segment)
            if isinstance(step, Redistribute):
                self.redistribute_back(index, step)
            elif self.facts[step.operator.name].backward:
                self.compute_back(index, step)
            if segment >= 0 and last[segment] == index:
                for memory in self.boundary.get(segment, ()):
                    self.read(memory)
        self.reduce_buckets()

    def recompute(self, segment: int) -> None:
        """Walk a segment forward once more, now keeping autograd's values."""
        values: dict[Place, int] = {}
        for index, step in enumerate(self.program.steps):
            if self.segment_of[index] == segment:
                self.run(index, step, values, keep=True)

    def add(self, place: Place, gradient: int) -> None:
        super().add(place, gradient)
        if place in self.stored:
            self.ready[place[0]] = self.now

    def flow(self, place: Place, same: int | None) -> None:
        if not self.is_cast(place[0]):
            super().flow(place, same)
            return
        # Autograd makes the gradient in the value's type, and it lives until it is cast.
        self.scratch.append((self.now, self.made_gradient_bytes(*place)))
        self.add(place, self.new(self.gradient_bytes(*place)))

    def read_saved(self, index: int) -> None:
        for memory in self.saved.get(index, ()):
            # Only what it comes from was saved: the value is made anew for this moment.
            while memory in self.shard:
                self.scratch.append((self.now, self.size[memory]))
                memory = self.shard[memory]
            self.read(memory)

    def reduce_buckets(self) -> None:
        """Copy each bucket flat and sum it, once its gradients and earlier buckets are ready.

        All buckets end together.
        """
        self.tick("")
        moment = 0
        # Permanent buffers are summed in place.
        for bucket in () if self.accumulating else scheduled(self.program).buckets:
            moment = max([moment, *(self.ready.get(name, 0) for name in bucket.parameters)])
            flat = self.new(float(bucket.nbytes), BUFFER)
            # The copy was made as soon as the last of its gradients was complete.
            self.birth[flat] = moment
            if any(degree_of(axes, self.mesh) > 1 for axes in bucket.sums):
                self.scratch.append((moment, float(bucket.nbytes)))
        for (name, layout), gradient in self.gradients.items():
            if (name, layout) in self.stored and self.tensors[name].role is Role.PARAMETER:
                self.what[gradient] = GRADIENT
                if not self.accumulating:
                    self.read(gradient)
