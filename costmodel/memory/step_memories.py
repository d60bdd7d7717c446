"""The memories of a program's values and gradients while its steps run, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TypeAlias

from autopar.sharding.program import Compute, Program
from autopar.sharding.schedule import Types

from .live_bytes import MISSING, STORED, LiveBytes
from .saved_values import Facts
from .step_script import Computed, Habits, Redistributed, StepScript

Here: TypeAlias = list[int]
"""The memory at every place, or `MISSING`."""
Saved: TypeAlias = dict[int, list[int]]
"""The memories that operators keep for their backward passes, by their steps; results that stay
while a step is recomputed are at the complement of its number.
"""


class Way(Enum):
    """A walk FORWARD, forward while it is KEEPING values for the backward pass, or BACK."""

    FORWARD = 0
    KEEPING = 1
    BACK = 2


class Steps(LiveBytes):
    """The memories of a program's steps.

    The subclass that walks them decides what happens in between. `values`: memories by the number
    of a place, which serve all passes. `prepared`: values that are made once. `gradients`: those on
    their way. `added`: the moment of the last gradient of each place.
    """

    def __init__(
        self, program: Program, facts: Mapping[str, Facts], types: Types, habits: Habits
    ) -> None:
        super().__init__()
        self.program = program
        self.types = types
        self.tensors = program.graph.tensors
        self.mesh = program.assignment.mesh.shape
        self.workers = [self.number_of(name) for name in _workers(program)]
        self.steps = StepScript(program, facts, types, habits)
        self.script = self.steps.write(self.workers)
        self.places = self.steps.places
        self.values = self.nowhere()
        self.prepared = self.nowhere()
        self.gradients = self.nowhere()
        self.added = self.nowhere()

    def nowhere(self) -> Here:
        """Places [places] of which none has a memory."""
        return [MISSING] * len(self.places)

    def value(self, place: int, here: Here) -> int:
        """The memory of a value; inputs, constants and stored parameters are counted apart."""
        memory = here[place]
        memory = self.values[place] if memory == MISSING else memory
        return STORED if memory == MISSING else memory

    def walk(self, steps: Sequence[int], here: Here, saved: Saved, way: Way) -> None:
        """Run steps in their order, with values at `here`; what operators keep is in `saved`."""
        for index in steps:
            step = self.script[index]
            if isinstance(step, Redistributed):
                if way is Way.BACK:
                    self._redistribute_back(step)
                else:
                    self._redistribute(step, here)
            elif way is not Way.BACK:
                keep = way is Way.KEEPING and step.like.backward
                saves = self._compute(step, here, keep=keep)
                if keep and saves is not None:
                    saved[index] = saves
                elif step.stays:
                    saved[~index] = self._results(step, here)
            elif step.like.backward:
                self._compute_back(step, saved.get(index, ()))
                for memory in saved.pop(~index, ()):
                    self.read(memory)

    def begin_back(self, place: int, gradient: int) -> None:
        """Put the gradient with which a backward pass begins at its place."""
        self.gradients[place] = gradient
        self.memories.holders[gradient] += 1

    # --- forward ---

    def _compute(self, step: Computed, here: Here, *, keep: bool) -> list[int] | None:
        """Run an operator; returns what it keeps, or None where its results are there already."""
        like = step.like
        prepared = self.prepared
        if like.once and all(prepared[place] != MISSING for place in step.outputs):
            return None
        memories = self.memories
        memories.moments.append(step.worker)
        # Inputs are looked up before any output takes its place.
        values = [self.value(place, here) for place in step.inputs]
        for memory in values:
            self.read(memory)
        for place, size in zip(step.outputs, like.sizes, strict=True):
            memory = values[0] if like.view else self.new(size)
            values.append(memory)
            here[place] = memory
            # A view is the memory of its source.
            if step.remade and memory != values[0]:
                memories.source[memory] = values[0]
            if like.once:
                prepared[place] = memory
        made = [self.new(size) for size in like.buffers]
        if not keep:
            return []
        saves = [*(values[position] for position in like.saves), *made]
        for memory in saves:
            if memory >= 0 and memories.keeper[memory] < 0:
                memories.keeper[memory] = step.worker
        return saves

    def _results(self, step: Computed, here: Here) -> list[int]:
        """The memories of an operator's results, which stay until its backward pass."""
        keeper = self.memories.keeper
        results = [here[place] for place in step.outputs]
        for memory in results:
            keeper[memory] = step.worker if keeper[memory] < 0 else keeper[memory]
        return results

    def _redistribute(self, step: Redistributed, here: Here) -> None:
        self.memories.moments.append(step.worker)
        if step.entering:
            here[step.behind] = STORED
            return
        memory = self.value(step.before, here)
        for link in step.links:
            self.read(memory)
            if link.made:
                self.temporary(link.scratch)
                made = self.new(link.size)
                if link.remade:
                    self.memories.source[made] = memory
                memory = made
        here[step.behind] = memory

    # --- backward ---

    def _compute_back(self, step: Computed, saves: Sequence[int]) -> None:
        like = step.like
        self.memories.moments.append(step.worker)
        taken = [self._gradient_at(place) for place in step.outputs]
        arrived = [gradient for gradient in taken if gradient != MISSING]
        for gradient in arrived:
            self.read(gradient)
        for memory in saves:
            self._read_saved(memory)
        # Nothing behind this operator leads to the loss.
        if not arrived:
            return
        if like.scratch is not None:
            self.temporary(like.scratch)
        for flow in like.flows:
            if flow.cast is not None:
                self.temporary(flow.cast)
            gradient = arrived[0] if flow.same else self.new(flow.size)
            self._add(step.inputs[flow.position], gradient)

    def _redistribute_back(self, step: Redistributed) -> None:
        gradient = self._gradient_at(step.behind) if step.differentiable else MISSING
        self.gradients[step.behind] = MISSING
        if gradient == MISSING:
            return
        self.memories.moments.append(step.worker)
        for link in reversed(step.links):
            self.read(gradient)
            if link.back_made:
                self.temporary(link.back_scratch)
                gradient = self.new(link.back_size)
        self._add(step.before, gradient)

    def _gradient_at(self, place: int) -> int:
        """The gradient at a place, which is there no longer."""
        gradient = self.gradients[place]
        self.gradients[place] = MISSING
        if gradient != MISSING:
            self.memories.holders[gradient] -= 1
        return gradient

    def _read_saved(self, memory: int) -> None:
        """Read a value that was kept; of one that can be made again its source was."""
        while memory >= 0 and self.memories.source[memory] != MISSING:
            self.temporary(self.memories.size[memory])
            memory = self.memories.source[memory]
        self.read(memory)

    def _add(self, place: int, gradient: int) -> None:
        """Add a reader's gradient of a value.

        The first is kept, others add to it, in place unless it is shared.
        """
        holders = self.memories.holders
        self.added[place] = self.now
        before = self.gradients[place]
        if before == MISSING:
            self.gradients[place] = gradient
            holders[gradient] += 1
            return
        self.read(before)
        self.read(gradient)
        # In place, the sum would change what other places refer to.
        if holders[before] > 1:
            holders[before] -= 1
            total = self.new(self.size[before])
            self.gradients[place] = total
            holders[total] = 1


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
