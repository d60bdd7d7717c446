"""The memories of a program's steps while it is walked forward and backward.

A step is a stretch of numbers. Places are numbered, and so
are memories in the order in which they are made.

    an operator
      code     flags, worker, slot, number of inputs, outputs, buffers, kept values and gradients;
               then the places of inputs and outputs; what is kept, as a position among these; and
               the place and the kind of each gradient
      sizes    of each output and buffer; temporary bytes backward; of each gradient with the
               temporary bytes of its cast
    a redistribution
      code     flags, worker, place before, place behind, number of its steps; then for each step
               what it makes of the value (0: nothing new; 1: new memory; 2: new memory that can be
               made again) and of the gradient
      sizes    for each step the temporary bytes forward, the value, the temporary bytes backward,
               the gradient
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

Ints: TypeAlias = "array[int]"
"""Of type "q"."""
Floats: TypeAlias = "array[float]"
"""Of type "d"."""

STORED = -1
"""The memory of permanently stored tensors, which are counted apart."""
MISSING = -2
"""The memory of a place where there is no value."""
PASSING = 3
"""The kind of a memory that nothing else is known of."""
CLOSED = 8
"""What is added to the kind of a memory that has been freed, although something refers to it."""


# Flags of a step. Its outputs are its first input's memory (VIEW), are made once for all
# micro-batches (ONCE), or are given up and made again from its first input (REMADE); it has a
# backward pass (BACKWARD), in which temporaries are made (HEAVY). A redistribution is of an INPUT
# of the model, and a gradient comes back through it (DIFFERENTIABLE).
REDISTRIBUTION = 1
VIEW = 2
BACKWARD = 4
ONCE = 8
INPUT = 16
DIFFERENTIABLE = 32
REMADE = 64
HEAVY = 128

# The gradient of an input is in new memory, in the same as the output's, or in new memory behind a
# cast from the type of the value.
NEW = 0
SAME = 1
CAST = 2


class Way(IntEnum):
    """A walk FORWARD, forward while it is KEEPING values for the backward pass, or BACK."""

    FORWARD = 0
    KEEPING = 1
    BACK = 2


class Script(NamedTuple):
    """The numbers of all steps; those of step i begin at `code_at[i]` and `sizes_at[i]`."""

    code: Ints
    sizes: Floats
    code_at: Ints
    sizes_at: Ints


class Places(NamedTuple):
    """The memory at every place, or `MISSING`.

    `here`: values. `gathered`: values that others have brought. `prepared`: values that are made
    once. `gradients`: those on their way. `added`: the moment of the last gradient. `saved`: by
    slots of the operators, the memories that they keep.
    """

    here: Ints
    gathered: Ints
    prepared: Ints
    gradients: Ints
    added: Ints
    saved: Ints


class Memories(NamedTuple):
    """Memories in the order in which they were made, and moments.

    `size` in bytes. `birth`, `death`: the moments of the first and the last use. `kind`: a number.
    `holders`: the places that refer to a gradient. `keeper`: the worker that first kept it, or -1.
    `source`: what it can be made from again, or `MISSING`. `moments`: the worker of each moment.
    `temporary_at`, `temporary`: moments and bytes of temporaries.
    """

    size: Floats
    birth: Ints
    death: Ints
    kind: Ints
    holders: Ints
    keeper: Ints
    source: Ints
    moments: Ints
    temporary_at: Ints
    temporary: Floats


def walk(
    script: Script, places: Places, memories: Memories, steps: Sequence[int], way: int
) -> None:
    """Walk `steps` in their order, and append what they make to `memories`."""
    walker = _Walker(script, places, memories)
    for index in steps:
        if way == Way.BACK:
            walker.back(index)
        else:
            walker.forward(index, keep=way == Way.KEEPING)


def new_memory(memories: Memories, size: float, kind: int = PASSING) -> int:
    """Append a memory that is made in the present moment, and return its number."""
    number = len(memories.size)
    now = len(memories.moments) - 1
    memories.size.append(size)
    memories.birth.append(now)
    memories.death.append(now)
    memories.kind.append(kind)
    memories.holders.append(0)
    memories.keeper.append(-1)
    memories.source.append(MISSING)
    return number


class _Walker:
    """Takes single steps."""

    def __init__(self, script: Script, places: Places, memories: Memories) -> None:
        self.code, self.sizes, self.code_at, self.sizes_at = script
        self.places = places
        self.memories = memories

    def forward(self, index: int, *, keep: bool) -> None:
        at = self.code_at[index]
        flags = self.code[at]
        if flags & REDISTRIBUTION:
            self._tick(at)
            self._redistribute(at, self.sizes_at[index], flags)
            return
        inputs, outputs = self.code[at + 3 : at + 5]
        made_at = at + 8 + inputs
        made = self.code[made_at : made_at + outputs]
        prepared = self.places.prepared
        if flags & ONCE and all(prepared[place] != MISSING for place in made):
            return
        self._tick(at)
        self._compute(at, self.sizes_at[index], flags, keep=keep)
        if flags & ONCE:
            for place in made:
                prepared[place] = self.places.here[place]

    def back(self, index: int) -> None:
        at = self.code_at[index]
        flags = self.code[at]
        if flags & REDISTRIBUTION:
            self._redistribute_back(at, self.sizes_at[index], flags)
        elif flags & BACKWARD:
            self._compute_back(at, self.sizes_at[index], flags)

    def _tick(self, at: int) -> None:
        self.memories.moments.append(self.code[at + 1])

    def _read(self, memory: int) -> None:
        # Released memory is not there, even if something still refers to it.
        if memory >= 0 and self.memories.kind[memory] < CLOSED:
            self.memories.death[memory] = len(self.memories.moments) - 1

    def _value(self, place: int) -> int:
        memory: int = self.places.here[place]
        if memory == MISSING:
            memory = self.places.gathered[place]
        return STORED if memory == MISSING else memory

    def _temporary(self, size: float) -> None:
        self.memories.temporary_at.append(len(self.memories.moments) - 1)
        self.memories.temporary.append(size)

    # --- forward ---

    def _compute(self, at: int, sizes_at: int, flags: int, *, keep: bool) -> None:
        _, _, slot, inputs, outputs, buffers, saves, _ = self.code[at : at + 8]
        code = self.code
        sizes = self.sizes
        at += 8
        # Inputs are looked up before any output takes its place.
        values = [self._value(place) for place in code[at : at + inputs]]
        for memory in values:
            self._read(memory)
        for number, place in enumerate(code[at + inputs : at + inputs + outputs]):
            viewed = flags & VIEW
            memory = values[0] if viewed else new_memory(self.memories, sizes[sizes_at + number])
            values.append(memory)
            self.places.here[place] = memory
            # A view is the memory of its source.
            if flags & REMADE and memory != values[0]:
                self.memories.source[memory] = values[0]
        sizes_at += outputs
        for size in sizes[sizes_at : sizes_at + buffers]:
            values.append(new_memory(self.memories, size))
        if not keep or not flags & BACKWARD:
            return
        at += inputs + outputs
        positions = [*code[at : at + saves], *range(inputs + outputs, len(values))]
        for number, position in enumerate(positions):
            memory = values[position]
            self.places.saved[slot + number] = memory
            if memory >= 0 and self.memories.keeper[memory] < 0:
                self.memories.keeper[memory] = self.memories.moments[-1]

    def _redistribute(self, at: int, sizes_at: int, flags: int) -> None:
        before, behind, count = self.code[at + 2 : at + 5]
        if flags & INPUT:
            self.places.here[behind] = STORED
            return
        memory = self._value(before)
        for number in range(count):
            self._read(memory)
            makes = self.code[at + 5 + 2 * number]
            if makes:
                self._temporary(self.sizes[sizes_at + 4 * number])
                made = new_memory(self.memories, self.sizes[sizes_at + 4 * number + 1])
                if makes == 2:
                    self.memories.source[made] = memory
                memory = made
        self.places.here[behind] = memory

    # --- backward ---

    def _compute_back(self, at: int, sizes_at: int, flags: int) -> None:
        _, worker, slot, inputs, outputs, buffers, saves, flows = self.code[at : at + 8]
        self.memories.moments.append(worker)
        at += 8 + inputs
        arrived = [
            gradient
            for place in self.code[at : at + outputs]
            if (gradient := self._taken(place)) != MISSING
        ]
        for memory in self.places.saved[slot : slot + saves + buffers]:
            self._read_saved(memory)
        # Nothing behind this operator leads to the loss.
        if not arrived:
            return
        at += outputs + saves
        sizes_at += outputs + buffers
        if flags & HEAVY:
            self._temporary(self.sizes[sizes_at])
        sizes_at += 1
        for number in range(flows):
            place, flow = self.code[at + 2 * number : at + 2 * number + 2]
            size, cast = self.sizes[sizes_at + 2 * number : sizes_at + 2 * number + 2]
            if flow == CAST:
                self._temporary(cast)
            gradient = arrived[0] if flow == SAME else new_memory(self.memories, size)
            self._add(place, gradient)

    def _redistribute_back(self, at: int, sizes_at: int, flags: int) -> None:
        worker, before, behind, count = self.code[at + 1 : at + 5]
        gradient = self.places.gradients[behind]
        self.places.gradients[behind] = MISSING
        if gradient == MISSING or not flags & DIFFERENTIABLE:
            return
        self.memories.moments.append(worker)
        self.memories.holders[gradient] -= 1
        for number in reversed(range(count)):
            self._read(gradient)
            if self.code[at + 6 + 2 * number]:
                self._temporary(self.sizes[sizes_at + 4 * number + 2])
                gradient = new_memory(self.memories, self.sizes[sizes_at + 4 * number + 3])
        self._add(before, gradient)

    def _taken(self, place: int) -> int:
        """Read the gradient at a place, which is there no longer."""
        gradient: int = self.places.gradients[place]
        if gradient != MISSING:
            self.places.gradients[place] = MISSING
            self._read(gradient)
            self.memories.holders[gradient] -= 1
        return gradient

    def _read_saved(self, memory: int) -> None:
        """Read a value that was kept; of one that can be made again its source was."""
        while memory >= 0 and self.memories.source[memory] != MISSING:
            self._temporary(self.memories.size[memory])
            memory = self.memories.source[memory]
        self._read(memory)

    def _add(self, place: int, gradient: int) -> None:
        """Add a reader's gradient of a value.

        The first is kept, others add to it, in place unless it is shared.
        """
        holders = self.memories.holders
        self.places.added[place] = len(self.memories.moments) - 1
        before = self.places.gradients[place]
        if before == MISSING:
            self.places.gradients[place] = gradient
            holders[gradient] += 1
            return
        self._read(before)
        self._read(gradient)
        # In place, the sum would change what other places refer to.
        if holders[before] > 1:
            holders[before] -= 1
            total = new_memory(self.memories, self.memories.size[before])
            self.places.gradients[place] = total
            holders[total] = 1
