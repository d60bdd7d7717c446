"""The outline of tables: the variables, what they choose among, and which tensors join them, whatever is done how often.

It is made once for a model (or one micro-batch of it) on a mesh, and priced for any multiplicities (`building.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.costmodel.step.layout_space import LayoutSpace
from autopar.search import NoAssignment

from ..ir import Operator, Tensor
from ..sharding.candidates import Strategies
from .choices import Choices, Choosing, codes_of, kinds_read
from .limits import Limits
from .tables import Basis, Ints, Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A redistribution of a tensor, done `count` times, from the choices of one variable to those of another, by their layouts' codes."""

    tensor: str
    source: int
    source_codes: Ints
    target: int
    target_codes: Ints
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The variables and joins of tables, in the order of the model.

    By the number of their variable: `parameters`, `operators`, and `free`, the choices of layouts, which cost nothing.
    """

    variables: tuple[Variable, ...]
    strategies: dict[str, Strategies]
    parameters: dict[int, Tensor]
    operators: dict[int, Operator]
    free: dict[int, Choices]
    joins: tuple[Join, ...]


def outlined(basis: Basis, limits: Limits) -> Outline:
    """The outline within the limits; `NoAssignment` where they leave a variable no choice."""
    return _Outliner(basis, limits).run()


class _Outliner:
    """Adds the variables in the order of the model, each with its joins to earlier ones.

    `at`: the variable from which readers take a tensor. `codes`: the layouts of a tensor by the choices of a variable. `made`: the maker
    of each tensor. `handed`: readers that must also read the last layer's value (see `_hand_on`).
    """

    def __init__(self, basis: Basis, limits: Limits) -> None:
        self.basis, self.analysis, self.graph = basis, basis.analysis, basis.graph
        self.choosing = Choosing(basis, limits)
        self.variables: list[Variable] = []
        self.joins: list[Join] = []
        self.strategies: dict[str, Strategies] = {}
        self.parameters: dict[int, Tensor] = {}
        self.operators: dict[int, Operator] = {}
        self.free: dict[int, Choices] = {}
        self.at: dict[str, int] = {}
        self.codes: dict[tuple[int, str], Ints] = {}
        self.made: dict[str, tuple[int, Ints]] = {}
        self.handed: list[tuple[str, int, Ints, int]] = []

    def run(self) -> Outline:
        for tensor in self.graph.parameters:
            if tensor.name in self.analysis.readers:
                stored = self._add("parameter", tensor.name, self.choosing.parameter(tensor).rows)
                self.parameters[stored] = tensor
                self._spread(tensor.name, stored, self.variables[stored].rows)
        for op in self.graph.operators:
            if op.name not in self.analysis.cold:
                self._operator(op)
        self._hand_on()
        return Outline(
            variables=tuple(self.variables), strategies=self.strategies, parameters=self.parameters, operators=self.operators,
            free=self.free, joins=tuple(self.joins),
        )  # fmt: skip

    def _add(self, what: str, name: str, rows: Ints) -> int:
        if not len(rows):
            raise NoAssignment  # each of several limits leaves some, and all together none
        self.variables.append(Variable(what=what, name=name, rows=rows))
        return len(self.variables) - 1

    def _operator(self, op: Operator) -> None:
        strategies, rows = self.choosing.operator(op)
        self.strategies[op.name] = strategies
        variable = self._add("operator", op.name, rows)
        self.operators[variable] = op
        for position, name in enumerate(op.inputs):
            if name in self.at:
                self._read(name, variable, codes_of(self.basis, op, strategies, rows, position, output=False))
        for position, name in enumerate(op.outputs):
            # A value without readers has no space of layouts.
            if name in self.basis.spaces:
                self._spread(name, variable, codes_of(self.basis, op, strategies, rows, position, output=True))

    def _spread(self, name: str, source: int, codes: Ints) -> None:
        """Join a new tensor to a fan-out (if it has several readers) and to an output variable (if it is an output)."""
        readers = self.analysis.readers.get(name, ())
        if not readers:
            return
        self.at[name] = source
        self.codes[source, name] = codes
        self.made[name] = source, codes
        if len(readers) > 1:
            fan = self._layouts("fan-out", name, self.choosing.fan_out(name, codes, self._kinds_read(name, readers)))
            self.at[name] = fan
            self.codes[fan, name] = self.variables[fan].rows
        for operator, _ in readers:
            # A negative reader is the model's output.
            if operator < 0:
                self._layouts("output", name, self.choosing.output(name))

    def _kinds_read(self, name: str, readers: Sequence[tuple[int, int]]) -> list[int]:
        return self.basis.known.once(("kinds read", name), lambda: kinds_read(self.basis, name, readers))

    def _layouts(self, what: str, name: str, choices: Choices) -> int:
        """Add a variable whose choices are layouts of a tensor, and join the tensor to it."""
        target = self._add(what, name, choices.rows)
        self.free[target] = choices
        self._read(name, target, choices.rows)
        return target

    def _read(self, name: str, target: int, target_codes: Ints) -> None:
        """Join a tensor to a variable that needs it in the layouts `target_codes`."""
        variable, counts, source = self.variables[target], self.basis.work.counts, self.at[name]
        of = counts.operators if variable.what == "operator" else counts.tensors
        count = of.get(variable.name, 1)
        if name in counts.handed and self.made[name][0] == source and count > 1:
            self.handed.append((name, target, target_codes, count - 1))
            count = 1
        self._join(name, source, self.codes[source, name], target, target_codes, count)

    def _hand_on(self) -> None:
        """Let readers of the first layer's values also read its representative's, once for each further layer."""
        for name, target, target_codes, count in self.handed:
            other = self.basis.work.counts.handed[name]
            source, codes = self.made[other]
            mine, theirs = self.basis.spaces[name], self.basis.spaces[other]
            # The two values may have different spaces: translate the layouts by their kinds.
            same = np.array([mine.kinds.index(kind) if kind in mine.kinds else -1 for kind in theirs.kinds])
            digits = same[theirs.digits()[codes]]
            assert (digits >= 0).all(), "equal operators give their outputs in equal ways"
            self._join(name, source, self._in_space(codes, digits, mine), target, target_codes, count)

    def _in_space(self, codes: Ints, digits: Ints, space: LayoutSpace) -> Ints:
        """The codes of layouts in `space`, given their `digits`; `codes`: their codes in their own space, as a key."""
        return self.basis.known.once(("handed", id(codes), id(space)), lambda: space.codes(digits))

    def _join(self, name: str, source: int, source_codes: Ints, target: int, target_codes: Ints, count: int) -> None:
        self.joins.append(
            Join(tensor=name, source=source, source_codes=source_codes, target=target, target_codes=target_codes, count=count)
        )
