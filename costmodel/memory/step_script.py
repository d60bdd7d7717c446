"""The steps of a program with places and bytes looked up, for walks over its memories.

A place is a tensor in a layout. Places and what is at work have numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from autopar.ir import Operator, Role
from autopar.sharding.layout import Kind, Layout
from autopar.sharding.program import Compute, Decision, Program, Redistribute
from autopar.sharding.redistribution import change
from autopar.sharding.rules import RULES
from autopar.sharding.rules.saved_for_backward import Made
from autopar.sharding.schedule import Types
from autopar.sharding.strategies import splits_plainly

from .redistribution_memory import actions
from .saved_values import Facts

Place = tuple[str, Layout]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Habits of a walk beside its steps.

    `once`: what no strategy splits is made once for all micro-batches. `regather`: gathered values
    are given up, and gathered again where the backward pass reads them; `units`: the same of
    parameters alone. `discarded`: operators whose results are given up, too; `stays`: those whose
    results stay though they are recomputed. `casts`: a gradient is made in the type of its value,
    and cast. `fused`: products add gradients of weights to buffers that are there.
    """

    once: bool = False
    regather: bool = False
    units: bool = False
    discarded: frozenset[str] = frozenset()
    stays: frozenset[str] = frozenset()
    casts: bool = False
    fused: bool = False


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
            or (made.inside and option.passes(decision.rule, made.factors))
        )
    if made.passed:
        shards = math.prod(
            ranks
            for option, ranks in zip(decision.options, mesh, strict=True)
            if option.passes(decision.rule, made.passed)
        )
        each *= float(made.times(shards, decision.rule.size_of(made.passed)))
    return each


class Flow(NamedTuple):
    """The gradient of the input at `position`, in bytes.

    `same`: it is in the memory of the output's. `cast`: it is made in so many bytes, and cast.
    """

    position: int
    same: bool
    size: float
    cast: float | None


class Alike(NamedTuple):
    """The part that equal operators with equal decisions share: bytes of all that they make.

    `view`: outputs are the first input's memory. `once`: they are made once for all micro-batches.
    `saves`: what the backward pass keeps, as positions among inputs and outputs, beside `buffers`.
    `scratch`: temporary bytes backward.
    """

    view: bool
    once: bool
    backward: bool
    sizes: tuple[float, ...]
    buffers: tuple[float, ...]
    saves: tuple[int, ...]
    scratch: float | None
    flows: tuple[Flow, ...]


class Computed(NamedTuple):
    """The step of an operator, by the numbers of places.

    `remade`: its results are given up, and made again from its first input. `stays`: they are kept
    where it is recomputed.
    """

    worker: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    remade: bool
    stays: bool
    like: Alike


class Moved(NamedTuple):
    """A link of a redistribution: bytes of the value behind it, and of the gradient before it.

    `made`: whether the value is in new memory; `remade`: which can be made again. `scratch`:
    temporary bytes.
    """

    made: bool
    remade: bool
    size: float
    scratch: float
    back_made: bool
    back_size: float
    back_scratch: float


class Redistributed(NamedTuple):
    """The step of a redistribution; `entering`: of an input of the model."""

    worker: int
    before: int
    behind: int
    entering: bool
    differentiable: bool
    links: tuple[Moved, ...]


Step: TypeAlias = Computed | Redistributed


class StepScript:
    """Writes the steps of a program; `places`: by their numbers."""

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
        self._numbers: dict[Place, int] = {}
        self._shards: dict[Layout, int] = {}
        self._alike: dict[object, Alike] = {}

    def write(self, workers: Sequence[int]) -> list[Step]:
        """Write all steps; `workers`: what is at work in each."""
        # Units of parameters look up places of storage and of outputs that no step may have.
        for place in self.program.assignment.storage.items():
            self.number(place)
        for place in self.program.assignment.outputs.items():
            self.number(place)
        return [
            self._redistributed(step, worker)
            if isinstance(step, Redistribute)
            else self._computed(step, worker)
            for step, worker in zip(self.program.steps, workers, strict=True)
        ]

    def number(self, place: Place) -> int:
        """The number of a place."""
        number = self._numbers.setdefault(place, len(self.places))
        if number == len(self.places):
            self.places.append(place)
        return number

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

    def _computed(self, step: Compute, worker: int) -> Computed:
        operator = step.operator
        facts = self.facts[operator.name]
        # The program and the facts hold these objects, which equal operators share.
        casts = self._casts(operator, facts)
        narrow = tuple(self.tensors[name].narrow for name in operator.inputs)
        key = (id(step.decision), id(facts), casts, narrow)
        if key not in self._alike:
            self._alike[key] = self._alike_as(step, facts, casts)
        ins = map(self.number, zip(operator.inputs, step.decision.inputs, strict=True))
        outs = map(self.number, zip(operator.outputs, step.decision.outputs, strict=True))
        # Operators are discarded by name, so that this is no property of those that are alike.
        remade = operator.name in self.habits.discarded
        stays = operator.name in self.habits.stays
        return Computed(worker, tuple(ins), tuple(outs), remade, stays, self._alike[key])

    def _casts(self, operator: Operator, facts: Facts) -> tuple[bool, ...]:
        """Whether each gradient of an operator's inputs is cast as it is made."""
        names = (operator.inputs[position] for position, _ in facts.flows)
        return tuple(self.habits.casts and self.is_cast(name) for name in names)

    def _alike_as(self, step: Compute, facts: Facts, casts: tuple[bool, ...]) -> Alike:
        operator = step.operator
        keeps = facts.keeps
        ins = list(zip(operator.inputs, step.decision.inputs, strict=True))
        outs = zip(operator.outputs, step.decision.outputs, strict=True)
        flows = []
        weighs = self.habits.fused and RULES[operator.kind].products
        for (position, same), is_cast in zip(facts.flows, casts, strict=True):
            if weighs and self.tensors[operator.inputs[position]].role is Role.PARAMETER:
                flows.append(Flow(position, False, 0.0, None))
                continue
            # Autograd makes the gradient in the value's type, and it lives until it is cast.
            made = self.made_gradient_bytes(*ins[position])
            size = self.gradient_bytes(*ins[position]) if is_cast else made
            same_memory = same and not is_cast
            flows.append(Flow(position, same_memory, size, made if is_cast else None))
        return Alike(
            view=bool(facts.view and ins),
            once=self.habits.once and step.decision.rule is None,
            backward=facts.backward,
            sizes=tuple(self.bytes_of(*place) for place in outs),
            buffers=tuple(self.made_bytes(step, one) for one in keeps.made),
            saves=(*keeps.inputs, *(len(ins) + position for position in keeps.outputs)),
            scratch=sum(self.made_bytes(step, one) for one in facts.scratch)
            if facts.scratch
            else None,
            flows=tuple(flows),
        )

    def _redistributed(self, step: Redistribute, worker: int) -> Redistributed:
        tensor = self.tensors[step.tensor]
        remakes = self.habits.regather or (self.habits.units and tensor.role is Role.PARAMETER)
        links = []
        for index, (first, second) in enumerate(itertools.pairwise(step.chain)):
            moved = change(first, second, self.mesh)
            size = self.bytes_of(step.tensor, first)
            ahead, back = actions(moved.before, moved.after, size, moved.degree)
            # The steps before only say that gradients are summed in a bucket: the value stays.
            made = index >= step.bucketed
            links.append(
                Moved(
                    made=bool(made and ahead.made),
                    remade=bool(remakes and ahead.gathers),
                    size=self.bytes_of(step.tensor, second),
                    scratch=ahead.scratch,
                    back_made=bool(made and back.made),
                    back_size=self.gradient_bytes(step.tensor, first),
                    back_scratch=back.scratch,
                )
            )
        return Redistributed(
            worker=worker,
            before=self.number((step.tensor, step.chain[0])),
            behind=self.number((step.tensor, step.chain[-1])),
            entering=tensor.role is Role.INPUT,
            differentiable=step.differentiable,
            links=tuple(links),
        )
