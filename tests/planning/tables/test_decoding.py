"""The chains of a decoded solution are the cheapest ones for as often as they are sent."""

from __future__ import annotations

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.planning.space import Multiplicities
from autopar.planning.tables import Tables, decode
from autopar.planning.tables.build import build_tables
from autopar.sharding.analysis import analyse
from autopar.sharding.layout import B, Layout, R, S, format_layout
from autopar.sharding.mesh import Axis, Mesh
from benchmarks.searching import models
from benchmarks.validating.known.transformer import transformer

MESH = Mesh(axes=(Axis(name="node", size=8, level="nic"), Axis(name="gpu", size=8, level="nvlink")))
QUERY = "layers.0.attention.query.weight"


def _choices(tables: Tables, stored: Layout, used: Layout) -> tuple[int, ...]:
    """Choices that store the weight in one layout, and use it in another."""
    readers = {op.name: op for op in tables.analysis.graph.operators if QUERY in op.inputs}
    choices = []
    for variable in tables.variables:
        rows = [int(row) for row in variable.rows]
        choice = 0
        if (variable.what, variable.name) == ("parameter", QUERY):
            choice = rows.index(tables.spaces[QUERY].code(stored))
        elif variable.what == "operator" and variable.name in readers:
            place = readers[variable.name].inputs.index(QUERY)
            strategies = tables.strategies[variable.name]
            choice = next(
                n for n, row in enumerate(rows) if strategies.layouts(row)[0][place] == used
            )
        choices.append(choice)
    return tuple(choices)


@pytest.mark.parametrize(
    ("work", "chain"),
    [
        pytest.param(Multiplicities(), ["R S0", "R R", "B B"], id="all once"),
        pytest.param(
            Multiplicities(zero=3, passes=4.0, accumulating=True),
            ["R S0", "B S0", "B B"],
            id="shards are summed over nodes once a step, and gradients four times in a node",
        ),
    ],
)
def test_gradients_of_several_micro_batches_are_scattered_before_they_are_summed(
    work: Multiplicities, chain: list[str]
) -> None:
    graph = transformer(models.llama3_70b(1), batch=64).graph
    cluster = load_cluster("dgx-h100").sized(64)
    prices = MeshPrices(cluster=cluster, mesh=MESH)
    tables = build_tables(analyse(graph, train=True), prices, optimizer="adamw", work=work)
    chosen = decode(tables, _choices(tables, (R, S(0)), (B, B)))
    assert [[format_layout(layout) for layout in one] for one in chosen.chains[QUERY]] == [chain]
