"""From an analysed model and a mesh to the priced tables of a cost graph.

What does not depend on how often things are done is made once: the outline, and the prices of
operators and values. Tables of equal parts are one array, so that the search recognises equal
layers.
"""

from __future__ import annotations

from autopar.costmodel.redistribution.layout_space import layout_space
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.planning.model.restrictions import Limits
from autopar.planning.space import Multiplicities
from autopar.search import CostGraph
from autopar.sharding.analysis import Analysis
from autopar.sharding.layout import Layout
from autopar.sharding.schedule import PLAIN, Types

from .choices import Choosing
from .edges import TableEdges
from .operators import OperatorTables, operator_tables
from .outline import Outline, outlined
from .tables import Basis, Known, Tables
from .values import ValueTables, value_tables


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
    """Price every strategy, storage layout and redistribution of a model on one mesh.

    The model may be one micro-batch.

    `limits`: the allowed choices. `work`: the multiplicities of the step. `known`: parts of earlier
    tables of the same analysis, prices, optimizer, limits and types; new parts are added to it.
    """
    work = work or Multiplicities()
    known = known or Known()
    basis = Basis(
        analysis=analysis,
        prices=prices,
        optimizer=optimizer,
        work=work,
        types=types,
        known=known,
        spaces=known.once(
            "spaces",
            lambda: {
                name: layout_space(kinds, prices.mesh.shape)
                for name, kinds in analysis.kinds.items()
            },
        ),
        recomputed=frozenset(name for segment in work.segments for name in segment),
    )
    limits = limits or Limits()
    counts = work.counts
    # Counts are the only part of the multiplicities that the outline depends on.
    equal = tuple(frozenset(of.items()) for of in (counts.operators, counts.tensors, counts.handed))
    outline = known.once(("outline", equal), lambda: outlined(basis, limits))
    # Recomputed segments change what is repeated and saved, but not what is offered.
    repeated = (equal, work.segments)
    operators = known.once(("operators", repeated), lambda: operator_tables(basis, outline))
    values = known.once(
        ("values", repeated, work.waits, work.counted > 0), lambda: value_tables(basis, outline)
    )
    return _priced(basis, limits, outline, operators, values)


def _priced(
    basis: Basis, limits: Limits, outline: Outline, operators: OperatorTables, values: ValueTables
) -> Tables:
    """The tables of an outline under the multiplicities of the basis."""
    choosing = Choosing(basis, limits)
    edges = TableEdges(basis, outline)
    edges.price(values)
    stored = {
        variable: choosing.parameter(tensor) for variable, tensor in outline.parameters.items()
    }
    # Every variable is of exactly one of these kinds.
    by_variable = {**outline.free, **stored, **operators.priced(basis.work)}
    chosen = [by_variable[number] for number in range(len(outline.variables))]
    graph = CostGraph(
        sizes=tuple(len(v.rows) for v in outline.variables),
        unary=tuple(c.seconds for c in chosen),
        edges=edges.edges,
        memory=tuple(c.memory for c in chosen),
        digits=tuple(c.digits for c in chosen),
        names=tuple(f"{v.what} {v.name}" for v in outline.variables),
    )
    return Tables(
        analysis=basis.analysis,
        prices=basis.prices,
        optimizer=basis.optimizer,
        graph=graph,
        variables=outline.variables,
        offered=tuple(chosen),
        strategies=outline.strategies,
        spaces=basis.spaces,
        counts=basis.work.counts.tensors,
        aside=edges.aside,
        each=edges.each,
        types=basis.types,
        chains=basis.known.once("chains", dict[object, tuple[Layout, ...]]),
    )
