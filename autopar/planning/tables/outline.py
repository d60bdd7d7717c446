"""The outline of tables: variables, what they choose among, and the tensors that join them.

An outline is the same for any multiplicities, as it has no prices. So it is made once for a model
(or one micro-batch of it) on a mesh, and priced as often as the multiplicities change (`build.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.costmodel.redistribution.layout_space import LayoutSpace
from autopar.ir import Operator, Tensor
from autopar.planning.model.restrictions import Limits
from autopar.search import NoAssignment
from autopar.sharding.strategies import Strategies

from .choices import Allowed, Choosing, codes_of, kinds_read
from .tables import Basis, Choices, Codes, Ints, Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A redistribution of a tensor from the choices of one variable to those of another.

    `source`, `target`: the numbers of the variables; the codes: the tensor's layouts under each of
    their choices. `count`: how many equal redistributions it represents. `reader`: the operator
    that reads it, if it is one.
    """

    tensor: str
    source: int
    source_codes: Codes
    target: int
    target_codes: Codes
    count: int
    reader: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The operators of a variable, what each may choose, and the digits of their strategies."""

    operators: tuple[Operator, ...]
    allowed: tuple[Allowed, ...]
    digits: Ints

    def each(self) -> Iterator[tuple[Operator, Allowed]]:
        """Each operator with what it may choose."""
        return zip(self.operators, self.allowed, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The variables and joins of tables, in the order of the model.

    `parameters`, `regions`, `free`: by the number of a variable. `free`: choices of layouts, which
    cost nothing by themselves.
    """

    variables: tuple[Variable, ...]
    strategies: dict[str, Strategies]
    parameters: dict[int, Tensor]
    regions: dict[int, Decided]
    free: dict[int, Choices]
    joins: tuple[Join, ...]


def outlined(basis: Basis, limits: Limits) -> Outline:
    """Return the outline within the limits.

    Raises `NoAssignment` if the limits leave a variable no choice.
    """
    return _Outliner(basis, limits).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """A variable from which a tensor is taken, and the tensor's layouts under its choices."""

    variable: int
    codes: Codes


class _Outliner:
    """Adds the variables in the order of the model, each with its joins to earlier ones."""

    def __init__(self, basis: Basis, limits: Limits) -> None:
        self.basis = basis
        self.analysis = basis.analysis
        self.graph = basis.graph
        self.by_name = {op.name: op for op in self.graph.operators}
        self.choosing = Choosing(basis, limits)
        self.variables: list[Variable] = []
        self.joins: list[Join] = []
        self.strategies: dict[str, Strategies] = {}
        self.parameters: dict[int, Tensor] = {}
        self.regions: dict[int, Decided] = {}
        # The operators that are decided as one, by the name of their lead.
        self.parts: dict[str, Decided] = {}
        self.lead_of: dict[str, str] = {}
        self.free: dict[int, Choices] = {}
        # By the name of a tensor: its maker, and the variable from which its readers take it, which
        # is its fan-out if it has one.
        self.makers: dict[str, _Origin] = {}
        self.origins: dict[str, _Origin] = {}
        # Joins of what folded layers hand on to readers in the layers that they represent.
        self.handed: list[Join] = []

    def run(self) -> Outline:
        """Return the outline of the whole graph."""
        for region in self.analysis.regions:
            for part, allowed, digits in self.choosing.decided(region):
                operators = tuple(self.by_name[name] for name in part.members)
                self.parts[part.lead] = Decided(operators=operators, allowed=allowed, digits=digits)
                self.lead_of.update(dict.fromkeys(part.members, part.lead))
        for tensor in self.graph.parameters:
            if tensor.name in self.analysis.readers:
                stored = self._add("parameter", tensor.name, self.choosing.parameter(tensor).rows)
                self.parameters[stored] = tensor
                self._spread(tensor.name, stored, self._codes(stored))
        for lead, decided in self.parts.items():
            self._region(lead, decided)
        # A region may read what is made after its first member.
        for variable, decided in self.regions.items():
            self._take(variable, decided)
        self._hand_on()
        return Outline(
            variables=tuple(self.variables),
            strategies=self.strategies,
            parameters=self.parameters,
            regions=self.regions,
            free=self.free,
            joins=tuple(self.joins),
        )

    def _add(self, what: str, name: str, rows: Ints, members: tuple[str, ...] = ()) -> int:
        """Add a variable, and return its number."""
        if not len(rows):
            # Each of several limits leaves some choices, but all of them together leave none.
            raise NoAssignment
        self.variables.append(Variable(what=what, name=name, rows=rows, members=members))
        return len(self.variables) - 1

    def _codes(self, variable: int) -> Codes:
        """Return the layouts that a variable of layouts chooses among."""
        return self.basis.known.codes(self.variables[variable].rows)

    def _region(self, lead: str, decided: Decided) -> None:
        """Add operators that are decided as one, and let the readers of their outputs take them."""
        members = tuple(op.name for op in decided.operators)
        variable = self._add("operator", lead, decided.allowed[0].rows, members)
        self.regions[variable] = decided
        for op, allowed in decided.each():
            self.strategies[op.name] = allowed.strategies
            for position, name in enumerate(op.outputs):
                # A value without readers has no space of layouts.
                if name in self.basis.spaces:
                    codes = codes_of(self.basis, op, allowed, position, output=True)
                    self._spread(name, variable, codes)

    def _take(self, variable: int, decided: Decided) -> None:
        """Join the inputs of operators to them, apart from what these make themselves."""
        for op, allowed in decided.each():
            for position, name in enumerate(op.inputs):
                if name in self.origins and self.makers[name].variable != variable:
                    codes = codes_of(self.basis, op, allowed, position, output=False)
                    self._read(name, variable, codes, op.name)

    def _spread(self, name: str, source: int, codes: Codes) -> None:
        """Let readers take a new tensor, from a fan-out if there are several.

        A tensor that is an output of the model is joined to an output variable.
        """
        readers = [
            (operator, position)
            for operator, position in self.analysis.readers.get(name, ())
            if operator < 0 or self._lead(operator) != self.variables[source].name
        ]
        if not readers:
            return
        self.makers[name] = self.origins[name] = _Origin(variable=source, codes=codes)
        # A program makes a redistribution once; without a fan-out the tables would count it once
        # for each reader.
        if len(readers) > 1 or self._is_read_by_its_representative(name, readers):
            choices = self.choosing.fan_out(name, codes, self._kinds_read(name, readers))
            fan_out = self._layouts("fan-out", name, choices)
            self.origins[name] = _Origin(variable=fan_out, codes=self._codes(fan_out))
        for operator, _ in readers:
            # A negative reader is the model's output.
            if operator < 0:
                self._layouts("output", name, self.choosing.output(name))

    def _is_read_by_its_representative(self, name: str, readers: Sequence[tuple[int, int]]) -> bool:
        """Whether a reader of a tensor that layers hand on makes that of the next layer, as sums
        over layers do: no table joins a variable to itself.
        """
        behind = self.basis.work.counts.handed.get(name)
        parts = (self.parts[self._lead(number)] for number, _ in readers if number >= 0)
        return any(behind in op.outputs for part in parts for op in part.operators)

    def _lead(self, operator: int) -> str:
        """The lead of the region of an operator."""
        return self.lead_of[self.graph.operators[operator].name]

    def _kinds_read(self, name: str, readers: Sequence[tuple[int, int]]) -> list[int]:
        """Return the kinds in which readers may take a tensor; looked up once for all limits."""
        return self.basis.known.once(
            ("kinds read", name), lambda: kinds_read(self.basis, name, readers)
        )

    def _layouts(self, what: str, name: str, choices: Choices) -> int:
        """Add a variable whose choices are layouts of a tensor, and join the tensor to it."""
        target = self._add(what, name, choices.rows)
        self.free[target] = choices
        self._read(name, target, self._codes(target))
        return target

    def _read(self, name: str, target: int, target_codes: Codes, reader: str | None = None) -> None:
        """Join a tensor to a variable that needs it in the layouts `target_codes`."""
        variable = self.variables[target]
        counts = self.basis.work.counts
        origin = self.origins[name]
        of = counts.operators if variable.what == "operator" else counts.tensors
        count = of.get(variable.name, 1)
        join = Join(
            tensor=name,
            source=origin.variable,
            source_codes=origin.codes,
            target=target,
            target_codes=target_codes,
            count=count,
            reader=reader,
        )
        from_maker = name in counts.handed and self.makers[name].variable == origin.variable
        if from_maker and count > 1:
            # Only the second layer reads the first one's value. The layers behind it read the value
            # of the layer before them, which their representative makes (see `_hand_on`).
            self.handed.append(replace(join, count=count - 1))
            join = replace(join, count=1)
        self.joins.append(join)

    def _hand_on(self) -> None:
        """Join the values of representatives to the readers of the first layers' values."""
        for read in self.handed:
            representative = self.basis.work.counts.handed[read.tensor]
            maker = self.makers[representative]
            own = self.basis.spaces[read.tensor]
            theirs = self.basis.spaces[representative]
            # The two values may have different spaces: translate the layouts by their kinds.
            numbers = [own.kinds.index(kind) if kind in own.kinds else -1 for kind in theirs.kinds]
            digits = np.array(numbers)[theirs.digits()[maker.codes.array]]
            assert (digits >= 0).all(), "equal operators give their outputs in equal ways"
            codes = self._translated(("handed", maker.codes, theirs, own), own, digits)
            self.joins.append(replace(read, source=maker.variable, source_codes=codes))

    def _translated(self, key: object, space: LayoutSpace, digits: Ints) -> Codes:
        """Return the codes in `space` of the layouts with these `digits`, once for each key."""
        known = self.basis.known
        return known.once(key, lambda: known.codes(space.codes(digits)))
