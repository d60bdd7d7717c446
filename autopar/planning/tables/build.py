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
    limits = limits or Limits()
    basis = _basis(analysis, prices, optimizer, work, known, types)
    outline = _outline(basis, limits)
    operators = _operators(basis, outline)
    work = basis.work
    # Waits are part of every line, and passes that do not count make all seconds 0.
    values = basis.known.once(
        ("values", _repeated(work), work.waits, work.counted > 0),
        lambda: value_tables(basis, outline),
    )
    return _priced(basis, limits, outline, operators, values)


def least_saved(
    analysis: Analysis,
    prices: MeshPrices,
    *,
    optimizer: str,
    limits: Limits | None = None,
    work: Multiplicities | None = None,
    known: Known | None = None,
    types: Types = PLAIN.types,
) -> float:
    """Return the least bytes that operators save for the backward pass, over all choices.

    It is that of the tables which `build_tables` gives, without the rest of them.
    """
    basis = _basis(analysis, prices, optimizer, work, known, types)
    return _operators(basis, _outline(basis, limits or Limits())).least_saved(basis.work)


def _basis(
    analysis: Analysis,
    prices: MeshPrices,
    optimizer: str,
    work: Multiplicities | None,
    known: Known | None,
    types: Types,
) -> Basis:
    work = work or Multiplicities()
    known = known or Known()
    return Basis(
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


def _equal(work: Multiplicities) -> object:
    """The key of the counts, the only part of the multiplicities that the outline depends on."""
    counts = work.counts
    return tuple(frozenset(of.items()) for of in (counts.operators, counts.tensors, counts.handed))


def _repeated(work: Multiplicities) -> object:
    """The key of what is repeated and saved: recomputed segments change it, but not the choices."""
    return _equal(work), work.segments


def _outline(basis: Basis, limits: Limits) -> Outline:
    return basis.known.once(("outline", _equal(basis.work)), lambda: outlined(basis, limits))


def _operators(basis: Basis, outline: Outline) -> OperatorTables:
    key = ("operators", _repeated(basis.work))
    return basis.known.once(key, lambda: operator_tables(basis, outline))


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
        often=basis.work.gathers,
        chains=basis.known.on_mesh.once("chains", dict[object, tuple[Layout, ...]]),
    )
