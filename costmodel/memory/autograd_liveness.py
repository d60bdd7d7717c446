"""Bytes alive at every moment of a training step, as autograd runs it.

The program is walked forward, then backward. A memory is alive from the moment that makes it to the
last one that reads it. A saved value is read by its keeper's backward moment. Gradients of a value
with several readers add up in place. live(t) is the sum of the sizes of all memories alive at t;
the peak is its maximum. A recomputed segment keeps only its inputs, and is walked again before its
backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir import Role
from autopar.order.scheduled import scheduled
from autopar.order.value_flow import reads
from autopar.sharding.mesh import degree_of
from autopar.sharding.program import Program
from autopar.sharding.schedule import PLAIN, Types

from .live_bytes import BUFFER, GRADIENT, MISSING, STORED, Live
from .recompute import NO_RECOMPUTE, Recompute
from .saved_values import Facts
from .step_memories import Saved, Steps, Way
from .step_script import Habits


@dataclass(frozen=True, slots=True, kw_only=True)
class Autograd:
    """The passes of a training loop of plain autograd.

    `accumulating`: gradients are added to permanent buffers. `regather`: of gathered values only
    the shard is kept, and they are gathered again in the backward pass (parameters: ZeRO-3;
    activations: Megatron's sequence parallelism). `units`: the same of parameters alone. `fused`:
    products add gradients of weights to buffers that are there. `types`: of gradients, and of
    stored parameters, whose casts are counted apart.
    """

    train: bool = True
    recompute: Recompute = NO_RECOMPUTE
    accumulating: bool = False
    regather: bool = False
    units: bool = False
    fused: bool = False
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
        habits = Habits(
            regather=passes.regather,
            units=passes.units,
            discarded=passes.recompute.discarded,
            stays=passes.recompute.stays,
            casts=True,
            fused=passes.fused,
        )
        super().__init__(program, facts, passes.types, habits)
        self.accumulating = passes.accumulating
        self.saved: Saved = {}
        self.segment_of = self._segments(passes.recompute)
        self.began: dict[int, int] = {}
        self.boundary: dict[int, set[int]] = {}

    # --- forward ---

    def _segments(self, recompute: Recompute) -> list[int]:
        """The segment of every step, or -1."""
        names = {
            name: number for number, segment in enumerate(recompute.segments) for name in segment
        }
        return [names.get(self.names[worker], -1) for worker in self.workers]

    def forward(self, train: bool) -> None:
        steps = range(len(self.program.steps))
        for repeated, some in itertools.groupby(steps, lambda index: self.segment_of[index] >= 0):
            if repeated:
                # One by one, as what a segment's steps read is looked up in front of each.
                for index in some:
                    self.enter(index)
                    self.walk([index], self.values, self.saved, Way.FORWARD)
            else:
                way = Way.KEEPING if train else Way.FORWARD
                self.walk(list(some), self.values, self.saved, way)
        for name, layout in self.program.assignment.outputs.items():
            if name != self.program.graph.loss:
                self.read(self.value(self.steps.number((name, layout)), self.values))
        self.forward_end = self.now

    def enter(self, index: int) -> None:
        """Keep what a segment's next step reads from outside until its backward pass ends."""
        segment = self.segment_of[index]
        began = self.began.setdefault(segment, self.now + 1)
        keeper = self.memories.keeper
        for place in reads(self.program.steps[index]):
            memory = self.value(self.steps.number(place), self.values)
            if memory != STORED and self.memories.birth[memory] < began:
                self.boundary.setdefault(segment, set()).add(memory)
                keeper[memory] = self.workers[index] if keeper[memory] < 0 else keeper[memory]

    # --- backward ---

    def backward(self) -> None:
        graph = self.program.graph
        if graph.loss is not None:
            loss = self.steps.number((graph.loss, self.program.assignment.outputs[graph.loss]))
            self.begin_back(loss, self.new(self.tensors[graph.loss].bytes))
        recomputed: set[int] = set()
        steps = reversed(range(len(self.program.steps)))
        last: dict[int, int] = {}
        for index, segment in enumerate(self.segment_of):
            # Backward, a segment ends with its first step.
            last.setdefault(segment, index)
        for segment, some in itertools.groupby(steps, self.segment_of.__getitem__):
            indices = list(some)
            if segment >= 0 and segment not in recomputed:
                recomputed.add(segment)
                self.recompute(segment)
            self.walk(indices, self.values, self.saved, Way.BACK)
            if segment >= 0 and last[segment] == indices[-1]:
                for memory in self.boundary.get(segment, ()):
                    self.read(memory)
        self.reduce_buckets()

    def recompute(self, segment: int) -> None:
        """Walk a segment forward once more, now keeping autograd's values."""
        # Its values go with it, while gathered parameters are those of the first pass.
        steps = [index for index, of in enumerate(self.segment_of) if of == segment]
        self.walk(steps, self.nowhere(), self.saved, Way.KEEPING)

    def reduce_buckets(self) -> None:
        """Copy each bucket flat and sum it, once its gradients and earlier buckets are ready.

        All buckets end together.
        """
        self.tick("")
        moment = 0
        stored = self.program.assignment.storage
        # Permanent buffers are summed in place.
        for bucket in () if self.accumulating else scheduled(self.program).buckets:
            ready = (self.added[self.steps.number((n, stored[n]))] for n in bucket.parameters)
            moment = max(moment, *ready)
            flat = self.new(float(bucket.nbytes), BUFFER)
            # The copy was made as soon as the last of its gradients was complete.
            self.memories.birth[flat] = moment
            if any(degree_of(axes, self.mesh) > 1 for axes in bucket.sums):
                self.memories.temporary_at.append(moment)
                self.memories.temporary.append(float(bucket.nbytes))
        for place, gradient in enumerate(self.gradients):
            name, layout = self.places[place]
            parameter = self.tensors[name].role is Role.PARAMETER
            if gradient != MISSING and parameter and stored.get(name) == layout:
                self.mark(gradient, GRADIENT)
                if not self.accumulating:
                    self.read(gradient)
