"""The steps of a program as numbers, for walks over its memories.

A place is a tensor in a layout. Places and what is at work have numbers, and a step is a stretch of
`code` and `sizes` (`walked_memories.py` has their order).
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir import Operator, Role
from autopar.sharding.layout import Kind, Layout
from autopar.sharding.program import Compute, Decision, Program, Redistribute
from autopar.sharding.redistribution import change
from autopar.sharding.rules.saved_for_backward import Made
from autopar.sharding.schedule import Types
from autopar.sharding.strategies import splits_plainly

from .redistribution_memory import actions
from .saved_values import Facts
from .walked_memories import (
    BACKWARD,
    CAST,
    DIFFERENTIABLE,
    HEAVY,
    INPUT,
    MISSING,
    NEW,
    ONCE,
    REDISTRIBUTION,
    REMADE,
    SAME,
    VIEW,
    Ints,
    Script,
)

Place = tuple[str, Layout]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Habits of a walk beside its steps.

    `once`: what no strategy splits is made once for all micro-batches. `regather`: gathered values
    are given up, and gathered again where the backward pass reads them; `units`: the same of
    parameters alone. `discarded`: operators whose results are given up, too. `casts`: a gradient is
    made in the type of its value, and cast.
    """

    once: bool = False
    regather: bool = False
    units: bool = False
    discarded: frozenset[str] = frozenset()
    casts: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alike:
    """The numbers that equal operators with equal decisions share, all but those of places."""

    flags: int
    counts: tuple[int, ...]
    saves: list[int]
    flows: list[tuple[int, int]]
    sizes: list[float]
    slots: int


class StepScript:
    """Writes the script of a program.

    `places`: by their numbers. `slots`: how many memories operators keep for their backward passes.
    """

    def __init__(
        self, program: Program, facts: Mapping[str, Facts], types: Types, habits: Habits
    ) -> None:
        self.program = program
        self.facts = facts
        self.types = types
        self.habits = habits
        self.tensors = program.graph.tensors
        self.mesh = program.assignment.mesh.shape
        self.places: list[Place] = []
        self.slots = 0
        self._numbers: dict[Place, int] = {}
        self._shards: dict[Layout, int] = {}
        self._alike: dict[object, _Alike] = {}
        self._code: list[int] = []
        self._sizes: list[float] = []

    def write(self, workers: Sequence[int]) -> Script:
        """Write all steps; `workers`: what is at work in each."""
        # Units of parameters look up places of storage and of outputs that no step may have.
        for place in self.program.assignment.storage.items():
            self.number(place)
        for place in self.program.assignment.outputs.items():
            self.number(place)
        code_at: list[int] = []
        sizes_at: list[int] = []
        for step, worker in zip(self.program.steps, workers, strict=True):
            code_at.append(len(self._code))
            sizes_at.append(len(self._sizes))
            if isinstance(step, Redistribute):
                self._redistribution(step, worker)
            else:
                self._operator(step, worker)
        return Script(
            code=array("q", self._code),
            sizes=array("d", self._sizes),
            code_at=array("q", code_at),
            sizes_at=array("q", sizes_at),
        )

    def number(self, place: Place) -> int:
        """The number of a place."""
        number = self._numbers.setdefault(place, len(self.places))
        if number == len(self.places):
            self.places.append(place)
        return number

    def nowhere(self) -> Ints:
        """An array [places] in which no place has a memory."""
        return array("q", [MISSING]) * len(self.places)

    # --- bytes ---

    def bytes_of(self, name: str, layout: Layout) -> float:
        # Few layouts are those of very many tensors.
        shards = self._shards.get(layout)
        if shards is None:
            shards = self._shards[layout] = math.prod(
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

    # --- steps ---

    def _operator(self, step: Compute, worker: int) -> None:
        operator = step.operator
        facts = self.facts[operator.name]
        # The program and the facts hold these objects, which equal operators share.
        casts = self._casts(operator, facts)
        narrow = tuple(self.tensors[name].narrow for name in operator.inputs)
        key = (id(step.decision), id(facts), casts, narrow)
        if key not in self._alike:
            self._alike[key] = self._alike_as(step, facts, casts)
        alike = self._alike[key]
        number = self.number
        ins = [number(place) for place in zip(operator.inputs, step.decision.inputs, strict=True)]
        outs = map(number, zip(operator.outputs, step.decision.outputs, strict=True))
        # Operators are discarded by name, so that this is no property of those that are alike.
        flags = alike.flags | REMADE * (operator.name in self.habits.discarded)
        self._code += (flags, worker, self.slots, *alike.counts, *ins, *outs, *alike.saves)
        for position, flow in alike.flows:
            self._code += (ins[position], flow)
        self._sizes += alike.sizes
        self.slots += alike.slots

    def _casts(self, operator: Operator, facts: Facts) -> tuple[bool, ...]:
        """Whether each gradient of an operator's inputs is cast as it is made."""
        names = (operator.inputs[position] for position, _ in facts.flows)
        return tuple(self.habits.casts and self.is_cast(name) for name in names)

    def _alike_as(self, step: Compute, facts: Facts, casts: tuple[bool, ...]) -> _Alike:
        operator = step.operator
        keeps = facts.keeps
        ins = list(zip(operator.inputs, step.decision.inputs, strict=True))
        outs = list(zip(operator.outputs, step.decision.outputs, strict=True))
        saves = [*keeps.inputs, *(len(ins) + position for position in keeps.outputs)]
        sizes = [self.bytes_of(*place) for place in outs]
        sizes += [self.made_bytes(step, one) for one in keeps.made]
        # Always there, so that the gradients' sizes begin at the same place.
        sizes.append(sum(self.made_bytes(step, one) for one in facts.scratch))
        flows = []
        for (position, same), is_cast in zip(facts.flows, casts, strict=True):
            flow = SAME if same else NEW
            # Autograd makes the gradient in the value's type, and it lives until it is cast.
            flows.append((position, CAST if is_cast else flow))
            size = self.gradient_bytes if is_cast else self.made_gradient_bytes
            sizes += (size(*ins[position]), self.made_gradient_bytes(*ins[position]))
        return _Alike(
            flags=VIEW * bool(facts.view and ins)
            | BACKWARD * facts.backward
            | ONCE * (self.habits.once and step.decision.rule is None)
            | HEAVY * bool(facts.scratch),
            counts=(len(ins), len(outs), len(keeps.made), len(saves), len(facts.flows)),
            saves=saves,
            flows=flows,
            sizes=sizes,
            slots=len(saves) + len(keeps.made),
        )

    def _redistribution(self, step: Redistribute, worker: int) -> None:
        tensor = self.tensors[step.tensor]
        pairs = list(itertools.pairwise(step.chain))
        flags = (
            REDISTRIBUTION
            | INPUT * (tensor.role is Role.INPUT)
            | DIFFERENTIABLE * step.differentiable
        )
        before = self.number((step.tensor, step.chain[0]))
        behind = self.number((step.tensor, step.chain[-1]))
        self._code += (flags, worker, before, behind, len(pairs))
        remakes = self.habits.regather or (self.habits.units and tensor.role is Role.PARAMETER)
        for index, (first, second) in enumerate(pairs):
            moved = change(first, second, self.mesh)
            size = self.bytes_of(step.tensor, first)
            ahead, back = actions(moved.before, moved.after, size, moved.degree)
            # The steps before only say that gradients are summed in a bucket: the value stays.
            made = index >= step.bucketed
            makes = 2 if remakes and ahead.gathers else 1
            self._code += (makes if made and ahead.made else 0, int(made and back.made))
            self._sizes += (ahead.scratch, self.bytes_of(step.tensor, second))
            self._sizes += (back.scratch, self.gradient_bytes(step.tensor, first))
