"""The memories of a program's values and gradients while its steps run, forward and backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from autopar.ir import Role
from autopar.sharding.layout import Kind, Layout
from autopar.sharding.program import Compute, Decision, Program, Redistribute
from autopar.sharding.redistribution import change
from autopar.sharding.rules.saved_for_backward import Made
from autopar.sharding.schedule import Types
from autopar.sharding.strategies import splits_plainly

from .live_bytes import STORED, LiveBytes
from .redistribution_memory import Action, actions
from .saved_values import Facts

Place = tuple[str, Layout]


def made_for_each(decision: Decision, made: Made, mesh: Sequence[int]) -> float:
    """Bytes of a buffer that an operator makes, for each element of its tensor on this rank."""
    if decision.rule is None:
        return 0.0 if made.passed else made.nbytes
    each = made.nbytes
    # The tensor lacks these factors, but the buffer is split by them.
    if made.factors:
        each /= math.prod(
            size
            for option, size in zip(decision.options, mesh, strict=True)
            if splits_plainly(option, decision.rule, made.factors)
        )
    if made.passed:
        shards = math.prod(
            ranks
            for option, ranks in zip(decision.options, mesh, strict=True)
            if option.passes(decision.rule, made.passed)
        )
        each *= float(made.times(shards, decision.rule.size_of(made.passed)))
    return each


class Steps(LiveBytes):
    """The memories of a program's steps.

    The subclass that walks them decides what happens in between.
    """

    def __init__(self, program: Program, facts: Mapping[str, Facts], types: Types) -> None:
        super().__init__()
        self.program = program
        self.facts = facts
        self.types = types
        self.tensors = program.graph.tensors
        self.workers = _workers(program)
        self.mesh = program.assignment.mesh.shape
        self.shards: dict[Layout, int] = {}
        self.values: dict[Place, int] = {}
        self.saved: dict[int, list[int]] = {}  # step → the memories that its backward moment reads
        self.gradients: dict[Place, int] = {}
        # Gradient → the places that refer to it; one that several share is not added to in place.
        self.holders: dict[int, int] = {}

    # --- memories ---

    def bytes_of(self, name: str, layout: Layout) -> float:
        shards = self.shards.get(layout)
        if shards is None:
            shards = self.shards[layout] = math.prod(
                self.mesh[a] for a, p in enumerate(layout) if p.kind is Kind.SPLIT
            )
        return self.tensors[name].bytes / shards

    def gradient_bytes(self, name: str, layout: Layout) -> float:
        """The bytes of a gradient; a parameter's may travel in another type than the value's."""
        return self.bytes_of(name, layout) * self.types.wider(self.tensors[name])

    def made_gradient_bytes(self, name: str, layout: Layout) -> float:
        """The bytes of a gradient as an operator makes it, in the type of the value."""
        tensor = self.tensors[name]
        own = tensor.own_bytes / tensor.bytes if tensor.narrow is not None else 1.0
        return self.bytes_of(name, layout) * own

    def is_cast(self, name: str) -> bool:
        """Whether the gradient of a parameter travels in another type."""
        return self.types.reduced(self.tensors[name]) != self.tensors[name].dtype

    def value(self, place: Place, values: dict[Place, int]) -> int:
        """The memory of a value; inputs, constants and stored parameters are counted apart."""
        memory = values.get(place)
        return memory if memory is not None else self.values.get(place, STORED)

    # --- forward ---

    def compute(self, index: int, step: Compute, values: dict[Place, int], *, keep: bool) -> None:
        """Run an operator of the forward pass; `keep`: whether values are saved for autograd."""
        facts = self.facts[step.operator.name]
        operator = step.operator
        inputs = [
            self.value(place, values)
            for place in zip(operator.inputs, step.decision.inputs, strict=True)
        ]
        for memory in inputs:
            self.read(memory)
        if facts.view and inputs:
            outputs = [inputs[0]] * len(operator.outputs)
        else:
            outputs = [
                self.new(self.bytes_of(*place))
                for place in zip(operator.outputs, step.decision.outputs, strict=True)
            ]
        values.update(
            zip(zip(operator.outputs, step.decision.outputs, strict=True), outputs, strict=True)
        )
        keeps = facts.keeps
        made = [self.new(self.made_bytes(step, one)) for one in keeps.made]
        if keep and facts.backward:
            self.saved[index] = [
                *(inputs[i] for i in keeps.inputs),
                *(outputs[i] for i in keeps.outputs),
                *made,
            ]
            for memory in self.saved[index]:
                self.keeper.setdefault(memory, operator.name)

    def made_bytes(self, step: Compute, made: Made) -> float:
        """Bytes on this rank of a buffer that an operator makes besides its outputs."""
        operator = step.operator
        decision = step.decision
        names = operator.outputs if made.output else operator.inputs
        layouts = decision.outputs if made.output else decision.inputs
        name = names[made.position]
        tensor = self.tensors[name]
        share = self.bytes_of(name, layouts[made.position]) / max(tensor.bytes, 1)
        return share * tensor.size * made_for_each(decision, made, self.mesh)

    def redistribute(self, step: Redistribute, values: dict[Place, int]) -> None:
        """Run a redistribution step by step; inputs arrive in the layout in which they are read."""
        if self.tensors[step.tensor].role is Role.INPUT:
            values[step.tensor, step.chain[-1]] = STORED
            return
        memory = self.value((step.tensor, step.chain[0]), values)
        for index, (before, after) in enumerate(itertools.pairwise(step.chain)):
            self.read(memory)
            if index >= step.bucketed:
                # The steps before only say that gradients are summed in a bucket: the value stays.
                ahead, _ = self.actions(step.tensor, before, after)
                if ahead.made:
                    self.scratch.append((self.now, ahead.scratch))
                    made = self.new(self.bytes_of(step.tensor, after))
                    self.gathered(step.tensor, made, memory, ahead)
                    memory = made
        values[step.tensor, step.chain[-1]] = memory

    def gathered(self, name: str, made: int, memory: int, ahead: Action) -> None:
        """Note that `memory` of a tensor has been brought to `made`; a subclass may use it."""

    def actions(self, name: str, before: Layout, after: Layout) -> tuple[Action, Action]:
        step = change(before, after, self.mesh)
        return actions(step.before, step.after, self.bytes_of(name, before), step.degree)

    # --- backward ---

    def add(self, place: Place, gradient: int) -> None:
        """Add a reader's gradient of a value.

        The first is kept, others add to it, in place unless it is shared.
        """
        before = self.gradients.get(place)
        if before is None:
            self.gradients[place] = gradient
            self.holders[gradient] = self.holders.get(gradient, 0) + 1
        else:
            self.read(before)
            self.read(gradient)
            # In place, the sum would change what other places refer to.
            if self.holders[before] > 1:
                self.holders[before] -= 1
                total = self.new(self.size[before])
                self.gradients[place] = total
                self.holders[total] = 1

    def compute_back(self, index: int, step: Compute) -> None:
        """Run the backward pass of an operator."""
        self.tick(step.operator.name)
        operator = step.operator
        decision = step.decision
        facts = self.facts[step.operator.name]
        arrived = []
        for place in zip(operator.outputs, decision.outputs, strict=True):
            gradient = self.gradients.pop(place, None)
            if gradient is not None:
                self.read(gradient)
                self.holders[gradient] -= 1
                arrived.append(gradient)
        self.read_saved(index)
        # Nothing behind this operator leads to the loss.
        if not arrived:
            return
        if facts.scratch:
            held = sum(self.made_bytes(step, one) for one in facts.scratch)
            self.scratch.append((self.now, held))
        for position, same in facts.flows:
            self.flow(
                (operator.inputs[position], decision.inputs[position]), arrived[0] if same else None
            )

    def flow(self, place: Place, same: int | None) -> None:
        """Take the gradient of an input, in memory of its own or in the output's.

        `same`: the memory of the output's gradient, where the input's is (a view of) it.
        """
        self.add(place, self.new(self.made_gradient_bytes(*place)) if same is None else same)

    def read_saved(self, index: int) -> None:
        """Read the values that autograd has saved for a step."""
        for memory in self.saved.get(index, ()):
            self.read(memory)

    def redistribute_back(self, index: int, step: Redistribute) -> None:
        """Run the backward pass of a redistribution."""
        gradient = self.gradients.pop((step.tensor, step.chain[-1]), None)
        if gradient is None or not step.differentiable:
            return
        self.tick(self.workers[index])
        self.holders[gradient] -= 1
        for index, (before, after) in reversed(list(enumerate(itertools.pairwise(step.chain)))):
            self.read(gradient)
            if index >= step.bucketed:
                _, back = self.actions(step.tensor, before, after)
                if back.made:
                    self.scratch.append((self.now, back.scratch))
                    gradient = self.new(self.gradient_bytes(step.tensor, before))
        self.add((step.tensor, step.chain[0]), gradient)


def _workers(program: Program) -> list[str]:
    """The operator of every step; a redistribution belongs to the one behind it.

    Those of the model's outputs have none behind them, and belong to the last operator.
    """
    workers = []
    behind = program.graph.operators[-1].name if program.graph.operators else ""
    for step in reversed(program.steps):
        if isinstance(step, Compute):
            behind = step.operator.name
        workers.append(behind)
    return workers[::-1]
