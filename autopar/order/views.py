"""The steps that read a parameter's used value, forward and backward, directly or through views of its memory.

An operator that copies only if memory is out of order, as a reshape does, counts as a view: one gather too many costs
time, but a read of a released value gives wrong results.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ..sharding.program import Compute, Program, Redistribute, Step
from ..sharding.redistribution import change
from ..sharding.rules import RULES, Call
from ..sharding.rules.saved_for_backward import keeps, shares_memory
from .units import Mode
from .value_flow import PlacedValue, makes, reads


class Reads:
    """For each step the redistributions of parameters whose values it reads: `forward`, and in the `backward` pass.

    Backward counts only mode again: other values are there all the time.
    """

    def __init__(self, program: Program, modes: Mapping[int, Mode]) -> None:
        self._program, self._mesh = program, program.assignment.mesh.shape
        self._made = {makes(program.steps[index])[0]: index for index in modes}
        self._again = {place for place, index in self._made.items() if modes[index] is Mode.AGAIN}
        self._roots: dict[PlacedValue, PlacedValue] = {}  # the tensor behind each view
        self.forward: dict[int, tuple[int, ...]] = {}
        self.backward: dict[int, tuple[int, ...]] = {}
        for index, step in enumerate(program.steps):
            if index not in modes:
                self._read(index, step)

    def _read(self, index: int, step: Step) -> None:
        found = [self._roots.get(place, place) for place in reads(step)]
        members = [self._made[root] for root in found if root in self._made]
        if not members:
            return
        self.forward[index] = tuple(dict.fromkeys(members))
        again = [position for position, root in enumerate(found) if root in self._again]
        if not again:
            return
        if isinstance(step, Redistribute):
            if self._stays(step):
                self._roots[makes(step)[0]] = found[0]
            return
        kept = self._compute(step, found)
        self.backward[index] = tuple(self._made[found[position]] for position in again if kept is None or position in kept)

    def _compute(self, step: Compute, found: list[PlacedValue]) -> tuple[int, ...] | None:
        """The inputs that an operator's backward pass reads (None: unknown); also notes results that are views."""
        gradients = self._program.assignment.gradients
        if step.operator.kind not in RULES:
            return None
        call = Call.of(self._program.graph, step.operator)
        if found[0] in self._again and shares_memory(call, contiguous=True):
            self._roots.update(dict.fromkeys(makes(step), found[0]))
        if not any(name in gradients for name, _ in makes(step)):
            return ()
        return keeps(call, tuple(name in gradients for name in step.operator.inputs)).inputs

    def _stays(self, step: Redistribute) -> bool:
        """Whether a redistribution may share its source's memory, since it communicates nothing."""
        for before, after in itertools.pairwise(step.chain):
            moved = change(before, after, self._mesh)
            if moved.degree > 1 and moved.transfers[0] is not None:
                return False
        return True
