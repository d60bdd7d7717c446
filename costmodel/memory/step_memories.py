"""The memories of a program's values and gradients while its steps run, forward and backward."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from autopar.sharding.program import Compute, Program
from autopar.sharding.schedule import Types

from .live_bytes import LiveBytes
from .saved_values import Facts
from .step_script import Habits, StepScript
from .walked_memories import MISSING, STORED, Ints, Places, Way, walk


class Steps(LiveBytes):
    """The memories of a program's steps.

    The subclass that walks them decides what happens in between. `values`: memories by the number
    of a place, which serve all passes.
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
        self.values = self.steps.nowhere()
        self.prepared = self.steps.nowhere()
        self.gradients = self.steps.nowhere()
        self.added = self.steps.nowhere()

    def unsaved(self) -> Ints:
        """The memories that operators keep, by their slots, while none keeps any."""
        return array("q", [MISSING]) * self.steps.slots

    def value(self, place: int, here: Ints) -> int:
        """The memory of a value; inputs, constants and stored parameters are counted apart."""
        memory = here[place]
        memory = self.values[place] if memory == MISSING else memory
        return STORED if memory == MISSING else memory

    def walk(self, steps: Sequence[int], here: Ints, saved: Ints, way: Way) -> None:
        """Run steps in their order, with values at `here`; what operators keep is in `saved`."""
        places = Places(
            here=here,
            gathered=self.values,
            prepared=self.prepared,
            gradients=self.gradients,
            added=self.added,
            saved=saved,
        )
        walk(self.script, places, self.memories, steps, way)

    def begin_back(self, place: int, gradient: int) -> None:
        """Put the gradient with which a backward pass begins at its place."""
        self.gradients[place] = gradient
        self.memories.holders[gradient] += 1


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
