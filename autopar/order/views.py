"""The steps that read a parameter's used value, directly or through views of its memory.

An operator that copies only if memory is out of order, as a reshape does, counts as a view: one
gather too many costs time, but a read of a released value gives wrong results.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from autopar.sharding.program import Compute, Program, Redistribute, Step
from autopar.sharding.redistribution import change
from autopar.sharding.rules import RULES, Call
from autopar.sharding.rules.saved_for_backward import keeps, shares_memory

from .units import Mode
from .value_flow import PlacedValue, makes, reads


class Reads:
    """The redistributions of parameters whose values each step reads, forward and backward.

    Backward counts only mode per_pass: other values are there all the time.
    """

    def __init__(self, program: Program, modes: Mapping[int, Mode]) -> None:
        self._program = program
        self._mesh = program.assignment.mesh.shape
        self._made = {makes(program.steps[index])[0]: index for index in modes}
        self._per_pass = {
            place for place, index in self._made.items() if modes[index] is Mode.PER_PASS
        }
        self._roots: dict[PlacedValue, PlacedValue] = {}  # the tensor behind each view
        self.forward: dict[int, tuple[int, ...]] = {}
        self.backward: dict[int, tuple[int, ...]] = {}
        for index, step in enumerate(program.steps):
            if index not in modes:
                self._read(index, step)

    def _read(self, index: int, step: Step) -> None:
        roots = [self._roots.get(place, place) for place in reads(step)]
        members = [self._made[root] for root in roots if root in self._made]
        if not members:
            return
        self.forward[index] = tuple(dict.fromkeys(members))
        released = [position for position, root in enumerate(roots) if root in self._per_pass]
        if not released:
            return
        if isinstance(step, Redistribute):
            # It may be a view of the parameter, so that its readers read the parameter.
            if self._stays(step):
                self._roots[makes(step)[0]] = roots[0]
            return
        saved = self._compute(step, roots)
        self.backward[index] = tuple(
            self._made[roots[position]]
            for position in released
            if saved is None or position in saved
        )

    def _compute(self, step: Compute, roots: list[PlacedValue]) -> tuple[int, ...] | None:
        """The inputs that an operator's backward pass reads (None: unknown); notes views, too."""
        gradients = self._program.assignment.gradients
        # Without a rule an operator may read any of its inputs again.
        if step.operator.kind not in RULES:
            return None
        call = Call.of(self._program.graph, step.operator)
        if roots[0] in self._per_pass and shares_memory(call, contiguous=True):
            self._roots.update(dict.fromkeys(makes(step), roots[0]))
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
