"""From an analysed model and a mesh to the priced tables of a cost graph.

Tables are built once for each distinct signature and shared, so that the search recognises equal layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costmodel.step.layout_space import layout_space
from autopar.costmodel.step.pricing import MeshPrices
from autopar.search import CostGraph, NoAssignment

from ..ir import Operator
from ..sharding.analysis import Analysis
from ..sharding.candidates import Strategies
from ..sharding.layout import Layout
from ..sharding.schedule import PLAIN, Types
from .choices import Choices, Choosing, codes_of, kinds_read
from .limits import Limits
from .multiplicities import Multiplicities
from .table_edges import TableEdges
from .tables import Basis, Ints, Known, Tables, Variable


def build_tables(
    analysis: Analysis,
    prices: MeshPrices,
    *,
    optimizer: str,
    limits: Limits | None = None,
    work: Multiplicities | None = None,
    known: Known | None = None,
    types: Types = PLAIN.types,
) -> Tables:
    """Price every strategy, storage layout and redistribution of a model (or one micro-batch of it) on one mesh.

    `limits`: the allowed choices. `work`: the multiplicities of the step. `known`: parts of earlier tables of the same
    analysis, prices, optimizer and types; new parts are added to it.
    """
    work, known = work or Multiplicities(), known or Known()
    basis = Basis(
        analysis=analysis, prices=prices, optimizer=optimizer, work=work, types=types, known=known,
        spaces=known.once("spaces", lambda: {name: layout_space(kinds, prices.mesh.shape) for name, kinds in analysis.kinds.items()}),
        again=frozenset(name for segment in work.segments for name in segment),
    )  # fmt: skip
    return _Builder(basis, limits or Limits()).build()


class _Builder:
    """Adds the variables in the order of the model, each with its edges to earlier ones."""

    def __init__(self, basis: Basis, limits: Limits) -> None:
        self.basis, self.analysis, self.graph = basis, basis.analysis, basis.graph
        self.choosing = Choosing(basis, limits)
        self.variables: list[Variable] = []
        self.chosen: list[Choices] = []
        self.strategies: dict[str, Strategies] = {}
        self.joining = TableEdges(basis, self.variables)
        self.at: dict[str, int] = {}

    def build(self) -> Tables:
        for tensor in self.graph.parameters:
            if tensor.name in self.analysis.readers:
                stored = self._add("parameter", tensor.name, self.choosing.parameter(tensor))
                self._spread(tensor.name, stored, self.variables[stored].rows)
        for op in self.graph.operators:
            if op.name not in self.analysis.cold:
                self._operator(op)
        self.joining.hand_on()
        basis, chosen = self.basis, self.chosen
        graph = CostGraph(
            sizes=tuple(len(v.rows) for v in self.variables), unary=tuple(c.seconds for c in chosen), edges=self.joining.edges,
            memory=tuple(c.memory for c in chosen), digits=tuple(c.digits for c in chosen),
            names=tuple(f"{v.what} {v.name}" for v in self.variables),
        )  # fmt: skip
        return Tables(
            analysis=self.analysis, prices=basis.prices, optimizer=basis.optimizer, graph=graph, variables=tuple(self.variables),
            strategies=self.strategies, spaces=basis.spaces, counts=basis.work.counts.tensors, aside=self.joining.aside,
            each=self.joining.each, types=basis.types, chains=basis.known.once("chains", dict[object, tuple[Layout, ...]]),
        )  # fmt: skip

    def _add(self, what: str, name: str, found: Choices) -> int:
        if not len(found.rows):
            raise NoAssignment  # each of several limits leaves some, and all together none
        self.variables.append(Variable(what=what, name=name, rows=found.rows))
        self.chosen.append(found)
        return len(self.variables) - 1

    def _operator(self, op: Operator) -> None:
        strategies, found = self.choosing.operator(op)
        self.strategies[op.name] = strategies
        variable = self._add("operator", op.name, found)
        for position, name in enumerate(op.inputs):
            if name in self.at:
                codes = codes_of(self.basis, op, strategies, found.rows, position, output=False)
                self.joining.edge(name, self.at[name], variable, codes)
        for position, name in enumerate(op.outputs):
            # A value without readers has no space of layouts.
            if name in self.basis.spaces:
                self._spread(name, variable, codes_of(self.basis, op, strategies, found.rows, position, output=True))

    def _spread(self, name: str, source: int, codes: Ints) -> None:
        """Join a new tensor to a fan-out (if it has several readers) and to an output variable (if it is an output)."""
        readers = self.analysis.readers.get(name, ())
        if not readers:
            return
        self.at[name] = source
        self.joining.make(name, source, codes)
        if len(readers) > 1:
            fan = self._add("fan-out", name, self.choosing.fan_out(name, codes, self._kinds_read(name, readers)))
            self._layouts(name, fan)
            self.at[name] = fan
            self.joining.bring(name, fan)
        for operator, _ in readers:
            # A negative reader is the model's output.
            if operator < 0:
                self._layouts(name, self._add("output", name, self.choosing.output(name)))

    def _kinds_read(self, name: str, readers: Sequence[tuple[int, int]]) -> list[int]:
        return self.basis.known.once(("kinds read", name), lambda: kinds_read(self.basis, name, readers))

    def _layouts(self, name: str, target: int) -> None:
        """Join a tensor to a variable whose choices are its layouts."""
        self.joining.edge(name, self.at[name], target, self.variables[target].rows)
