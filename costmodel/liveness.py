"""Which bytes are alive at every moment of a training step: the program walked forward, then backward, as autograd runs it.

A memory is alive from the moment that makes it to the last that reads it. A value that autograd keeps is read by its keeper's
backward moment. Gradients of a value with several readers add up in place. live(t) = sum of the sizes of all that is alive at t;
the peak is its maximum. A segment that is recomputed keeps its inputs only, and is walked again before its backward pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir import Role
from autopar.order.places import only_casts
from autopar.order.scheduled import Mode, Scheduled, kept_steps, scheduled
from autopar.sharding.candidates import splits_plainly
from autopar.sharding.layout import Kind, Layout
from autopar.sharding.program import Compute, Program, Redistribute
from autopar.sharding.redistribution import changed_axis
from autopar.sharding.rules.saved import Made
from autopar.sharding.schedule import PLAIN, Types

from .kept import Facts
from .memories import BUFFER, GRADIENT, STORED, Live, Memories
from .moves import Action, actions

Place = tuple[str, Layout]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Groups of operators, by name, whose values are not kept but computed again in the backward pass, group by group."""

    segments: tuple[tuple[str, ...], ...] = ()


def live_bytes(
    program: Program, facts: Mapping[str, Facts], *, train: bool, recompute: Recompute, accumulating: bool, regather: bool = False,
    plan: Scheduled | None = None, types: Types = PLAIN.types,
) -> Live:  # fmt: skip
    """Walk a program once.

    `accumulating`: gradients are added to buffers that exist all the time. `regather`: what was gathered is not kept but its shard
    is, and gathered again in the backward pass (parameters: ZeRO-3; activations: sequence parallelism as Megatron has it). With a `plan`
    of the program both follow from that (`recompute` and `regather` are not read), and parameters that are kept from one micro-batch to
    the next are counted apart. `types`: of stored parameters and gradients.
    """
    walk = _Walk(program, facts, recompute, accumulating, regather, plan, types)
    walk.forward(train)
    if train:
        walk.backward()
    return walk.live(accumulating=accumulating)


class _Walk(Memories):
    """Where the values and gradients of a program lie while it runs."""

    def __init__(
        self, program: Program, facts: Mapping[str, Facts], recompute: Recompute, accumulating: bool, regather: bool,
        plan: Scheduled | None, types: Types,
    ) -> None:  # fmt: skip
        super().__init__()
        self.program, self.facts, self.accumulating, self.regather, self.types = program, facts, accumulating, regather, types
        self.tensors = program.graph.tensors
        self.mesh = program.assignment.mesh.shape
        self.shards: dict[Layout, int] = {}
        self.values: dict[Place, int] = {}
        self.shard: dict[int, int] = {}  # what was gathered → what it was gathered from
        self.saved: dict[int, list[int]] = {}  # step → the memories that its backward moment reads
        self.gradients: dict[Place, int] = {}
        self.holders: dict[int, int] = {}
        self.ready: dict[str, int] = {}  # parameter → the moment at which its gradient is complete
        self.stored = {(name, layout) for name, layout in program.assignment.storage.items()}
        self.segment_of = self._segments(recompute) if plan is None else self._again(plan)
        self.planned = plan is not None
        self.order = range(len(program.steps)) if plan is None else plan.order
        self.buckets = plan.buckets if plan is not None else scheduled(program).buckets
        self.again = {i for i, m in plan.modes.items() if m is Mode.AGAIN and self.segment_of[i] < 0} if plan is not None else frozenset()
        self.apart = frozenset(kept_steps(plan)) if plan is not None else frozenset()
        self.began: dict[int, int] = {}
        self.boundary: dict[int, set[int]] = {}
        self.entering: dict[int, set[Place]] = {}

    # --- memories ---

    def bytes_of(self, name: str, layout: Layout) -> float:
        shards = self.shards.get(layout)
        if shards is None:
            shards = self.shards[layout] = math.prod(self.mesh[a] for a, p in enumerate(layout) if p.kind is Kind.SPLIT)
        return self.tensors[name].bytes / shards

    def gradient_bytes(self, name: str, layout: Layout) -> float:
        """The bytes of a gradient, which of a parameter may be of another type than the value."""
        tensor = self.tensors[name]
        return self.bytes_of(name, layout) * (self.types.reduced_bytes(tensor) / tensor.bytes if tensor.bytes else 1.0)

    def value(self, place: Place, values: dict[Place, int]) -> int:
        """The memory of a value; inputs, constants and parameters as they are stored are counted apart."""
        found = values.get(place)
        return found if found is not None else self.values.get(place, STORED)

    # --- forward ---

    def _segments(self, recompute: Recompute) -> list[int]:
        """The segment of every step, or -1; a redistribution belongs to the operator behind it."""
        names = {name: number for number, segment in enumerate(recompute.segments) for name in segment}
        found, behind = [], -1
        for step in reversed(self.program.steps):
            if isinstance(step, Compute):
                behind = names.get(step.operator.name, -1)
            found.append(behind)
        return found[::-1]

    def _again(self, plan: Scheduled) -> list[int]:
        """The same of a program under a schedule."""
        found = [-1] * len(self.program.steps)
        for number, segment in enumerate(plan.segments):
            for index in segment.steps if segment.again else ():
                found[index] = number
        return found

    def forward(self, train: bool) -> None:
        for index in self.order:
            self.run(index, self.program.steps[index], self.values, keep=train and self.segment_of[index] < 0)
        for place in self.program.assignment.outputs.items():
            if place[0] != self.program.graph.loss:
                self.read(self.value(place, self.values))
        self.forward_end = self.now

    def run(self, index: int, step: Compute | Redistribute, values: dict[Place, int], *, keep: bool) -> None:
        """One step of the forward pass; `keep`: what autograd wants is kept."""
        self.tick(step.tensor if isinstance(step, Redistribute) else step.operator.name)
        segment = -1 if keep else self.segment_of[index]
        if isinstance(step, Redistribute):
            self.enter(segment, [(step.tensor, step.chain[0])], values)
            self.redistribute(index, step, values)
            return
        facts, operator = self.facts[step.operator.name], step.operator
        inputs = [self.value(place, values) for place in zip(operator.inputs, step.decision.inputs, strict=True)]
        for memory in inputs:
            self.read(memory)
        self.enter(segment, list(zip(operator.inputs, step.decision.inputs, strict=True)), values)
        if facts.view and inputs:
            outputs = [inputs[0]] * len(operator.outputs)
        else:
            outputs = [self.new(self.bytes_of(*place)) for place in zip(operator.outputs, step.decision.outputs, strict=True)]
        values.update(zip(zip(operator.outputs, step.decision.outputs, strict=True), outputs, strict=True))
        keeps = facts.keeps
        made = [self.new(self.made_bytes(step, one)) for one in keeps.made]
        if keep and facts.backward:
            self.saved[index] = [*(inputs[i] for i in keeps.inputs), *(outputs[i] for i in keeps.outputs), *made]
            for memory in self.saved[index]:
                self.keeper.setdefault(memory, operator.name)

    def enter(self, segment: int, places: Sequence[Place], values: dict[Place, int]) -> None:
        """What a segment reads from outside lives until its backward pass ends; the runtime lets go of its gradients there, too."""
        if segment >= 0:
            began = self.began.setdefault(segment, self.now)
            memories = {place: self.value(place, values) for place in places}
            outer = {place: m for place, m in memories.items() if m == STORED or self.birth[m] < began}
            if self.planned:
                self.entering.setdefault(segment, set()).update(outer)
            self.boundary.setdefault(segment, set()).update(m for m in outer.values() if m != STORED)
            for memory in outer.values():
                if memory != STORED:
                    self.keeper.setdefault(memory, self.moments[self.now])

    def made_bytes(self, step: Compute, made: Made) -> float:
        operator, decision = step.operator, step.decision
        names, layouts = (operator.outputs, decision.outputs) if made.output else (operator.inputs, decision.inputs)
        name, rule = names[made.position], decision.rule
        if made.factors and rule is not None:
            plain = (size for option, size in zip(decision.options, self.mesh, strict=True) if splits_plainly(option, rule, made.factors))
            made = replace(made, nbytes=made.nbytes / math.prod(plain), factors=())
        return self.bytes_of(name, layouts[made.position]) / max(self.tensors[name].bytes, 1) * self.tensors[name].size * made.nbytes

    def redistribute(self, number: int, step: Redistribute, values: dict[Place, int]) -> None:
        if number in self.apart or self.tensors[step.tensor].role is Role.INPUT:
            values[step.tensor, step.chain[-1]] = STORED
            return
        memory = self.value((step.tensor, step.chain[0]), values)
        if only_casts(step) and self.planned:  # without a plan, what is cast is counted apart
            memory = self.new(self.bytes_of(step.tensor, step.chain[0]))
        for index, (before, after) in enumerate(itertools.pairwise(step.chain)):
            self.read(memory)
            if index >= step.bucketed:
                ahead, _ = self.actions(step.tensor, before, after)
                if ahead.made:
                    self.scratch.append((self.now, ahead.scratch))
                    made = self.new(self.bytes_of(step.tensor, after))
                    if (self.regather or number in self.again) and ahead.gathers:
                        self.shard[made] = memory
                    memory = made
        values[step.tensor, step.chain[-1]] = memory

    def actions(self, name: str, before: Layout, after: Layout) -> tuple[Action, Action]:
        axis = changed_axis(before, after)
        return actions(before[axis], after[axis], self.bytes_of(name, before), self.mesh[axis])

    # --- backward ---

    def backward(self) -> None:
        graph = self.program.graph
        if graph.loss is not None:
            self.add((graph.loss, self.program.assignment.outputs[graph.loss]), self.new(self.tensors[graph.loss].bytes))
        again: set[int] = set()
        steps = self.program.steps
        last: dict[int, int] = {}
        for index in self.order:
            if self.segment_of[index] >= 0:
                last.setdefault(self.segment_of[index], index)
        for index in reversed(self.order):
            segment = self.segment_of[index]
            step = steps[index]
            if segment >= 0 and segment not in again:
                again.add(segment)
                self.recompute(segment)
            if isinstance(step, Redistribute):
                self.redistribute_back(step)
            elif self.facts[step.operator.name].backward:
                self.run_back(index, step)
            if segment >= 0 and last[segment] == index:
                for memory in self.boundary.get(segment, ()):
                    self.read(memory)
                for place in self.entering.get(segment, ()):
                    self.read(self.gradients.get(place, STORED))
        self.reduce_buckets()

    def recompute(self, segment: int) -> None:
        """Walk a segment forward once more, now keeping what autograd wants."""
        values: dict[Place, int] = {}
        for index in self.order:
            if self.segment_of[index] == segment:
                self.run(index, self.program.steps[index], values, keep=True)

    def add(self, place: Place, gradient: int) -> None:
        """A reader's contribution to the gradient of a value: the first is it, the others are added in place where it is not shared."""
        before = self.gradients.get(place)
        if before is None:
            self.gradients[place] = gradient
            self.holders[gradient] = self.holders.get(gradient, 0) + 1
        else:
            self.read(before)
            self.read(gradient)
            if self.holders[before] > 1:
                self.holders[before] -= 1
                total = self.new(self.size[before])
                self.gradients[place] = total
                self.holders[total] = 1
        if place in self.stored:
            self.ready[place[0]] = self.now

    def run_back(self, index: int, step: Compute) -> None:
        self.tick(step.operator.name)
        operator, decision, facts = step.operator, step.decision, self.facts[step.operator.name]
        arrived = []
        for place in zip(operator.outputs, decision.outputs, strict=True):
            gradient = self.gradients.pop(place, None)
            if gradient is not None:
                self.read(gradient)
                self.holders[gradient] -= 1
                arrived.append(gradient)
        for memory in self.saved.get(index, ()):
            while memory in self.shard:
                self.scratch.append((self.now, self.size[memory]))
                memory = self.shard[memory]
            self.read(memory)
        if not arrived:
            return
        if facts.scratch is not None:
            self.scratch.append((self.now, self.made_bytes(step, facts.scratch)))
        for position, same in facts.flows:
            place = operator.inputs[position], decision.inputs[position]
            cast = self.types.reduced(self.tensors[place[0]]) != self.tensors[place[0]].dtype
            if cast:
                self.scratch.append((self.now, self.bytes_of(*place)))
            self.add(place, arrived[0] if same and not cast else self.new(self.gradient_bytes(*place)))

    def redistribute_back(self, step: Redistribute) -> None:
        gradient = self.gradients.pop((step.tensor, step.chain[-1]), None)
        if gradient is None or not step.differentiable:
            return
        self.tick(step.tensor)
        self.holders[gradient] -= 1
        for index, (before, after) in reversed(list(enumerate(itertools.pairwise(step.chain)))):
            self.read(gradient)
            if index >= step.bucketed:
                _, back = self.actions(step.tensor, before, after)
                if back.made:
                    self.scratch.append((self.now, back.scratch))
                    gradient = self.new(self.gradient_bytes(step.tensor, before))
        self.add((step.tensor, step.chain[0]), gradient)

    def reduce_buckets(self) -> None:
        """A bucket is copied flat, and summed into a copy, once its gradients and the buckets before it are ready; all end together."""
        self.tick("")
        moment = 0
        for bucket in self.buckets:
            moment = max([moment, *(self.ready.get(name, 0) for name in bucket.parameters)])
            flat = self.new(float(bucket.nbytes), BUFFER)
            self.birth[flat] = moment
            if any(self.mesh[axis] > 1 for axis in bucket.axes):
                self.scratch.append((moment, float(bucket.nbytes)))
        for (name, layout), gradient in self.gradients.items():
            if (name, layout) in self.stored and self.tensors[name].role is Role.PARAMETER:
                self.what[gradient] = GRADIENT
                if not self.accumulating:
                    self.read(gradient)
