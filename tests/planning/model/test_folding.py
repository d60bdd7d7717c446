"""Folded layers: found in models of every kind, and standing for what they replace."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.costmodel import bind_axes
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.ir import Graph, Role
from autopar.options.plan_options import choose_cluster
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.folding import find_runs, fold
from autopar.planning.programs.whole_graph import unfold
from autopar.planning.space.candidates import name_axes
from autopar.planning.space.multiplicities import Multiplicities
from autopar.planning.tables.build import build_tables
from autopar.planning.tables.tables import Tables
from autopar.search import solve
from autopar.sharding.analysis import analyse
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer as known_transformer
from tests.planning.modules import loaded, perceptron, transformer

SMALL = {"hidden": 256, "heads": 8, "kv_heads": 8, "ffn": 1024, "vocab": 1024, "sequence": 128}


def graph_of(layers: int, **more: int) -> Graph:
    return known_transformer(Shape(layers=layers, **{**SMALL, **more}), batch=16).graph


def tables_of(graph: Graph, sizes: tuple[int, ...], work: Multiplicities | None = None) -> Tables:
    cluster = choose_cluster("dgx-h100", int(np.prod(sizes)))[0]
    mesh = name_axes(cluster, sizes, bind_axes(cluster, sizes) or ())
    return build_tables(
        analyse(graph, train=True),
        MeshPrices(cluster=cluster, mesh=mesh),
        optimizer="adamw",
        work=work,
    )


@pytest.mark.parametrize("layers", [4, 7])
def test_layers_are_found(layers: int) -> None:
    (run,) = find_runs(graph_of(layers))
    assert run.layers == layers
    (run,) = find_runs(loaded(transformer(layers, 64, 8), 8, 16, 64).graph)
    assert run.layers >= layers - 1


def test_layers_of_experts_come_in_pairs() -> None:
    (run,) = find_runs(graph_of(8, experts=4, expert_every=2))
    assert run.layers == 4


@pytest.mark.parametrize("layers", [1, 2])
def test_what_does_not_repeat_is_left(layers: int) -> None:
    graph = graph_of(layers)
    assert not find_runs(graph) and fold(graph).graph == graph


def test_layers_that_are_read_from_outside_are_left() -> None:
    """Every hidden state leaves the model, so no layer may go."""
    graph = loaded(perceptron(*[64] * 9), 8, 64).graph
    hidden = tuple(op.outputs[0] for op in graph.operators if op.kind == "aten.relu.default")
    assert find_runs(graph) or len(hidden) < 3
    kept = Graph(
        name=graph.name,
        tensors=graph.tensors,
        operators=graph.operators,
        inputs=graph.inputs,
        outputs=(*graph.outputs, *hidden),
        loss=graph.loss,
    )
    assert not find_runs(kept)


@pytest.mark.parametrize("more", [{}, {"experts": 4, "expert_every": 2}])
def test_every_operator_and_tensor_has_one_that_stands_for_it(more: dict[str, int]) -> None:
    graph = graph_of(8, **more)
    folding = fold(graph)
    kept = {op.name: op for op in folding.graph.operators}
    assert set(folding.operators) == {op.name for op in graph.operators} and set(
        folding.operators.values()
    ) == set(kept)
    assert set(folding.tensors.values()) == set(folding.graph.tensors)
    for op in graph.operators:
        other = kept[folding.operators[op.name]]
        assert (op.kind, len(op.inputs)) == (other.kind, len(other.inputs))
    for name, stands in folding.tensors.items():
        mine = graph.tensors[name]
        theirs = folding.graph.tensors[stands]
        assert (mine.shape, mine.dtype, mine.role) == (theirs.shape, theirs.dtype, theirs.role)
    weights = sum(
        folding.counts.tensors[t.name] * t.bytes
        for t in folding.graph.tensors.values()
        if t.role is Role.PARAMETER
    )
    assert weights == sum(t.bytes for t in graph.parameters)


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
@pytest.mark.parametrize("layers", [3, 6, 12])
def test_a_folded_graph_costs_what_the_whole_one_costs(sizes: tuple[int, ...], layers: int) -> None:
    graph = graph_of(layers)
    folding = fold(graph)
    whole = tables_of(graph, sizes)
    short = tables_of(folding.graph, sizes, Multiplicities(counts=folding.counts))
    solution = solve(short.graph)
    assert solution.cost == pytest.approx(solve(whole.graph).cost, rel=1e-3)
    # The folded solution, spread over the whole graph, costs and fills what it says.
    rows = {
        (v.what, v.name): v.rows[c] for v, c in zip(short.variables, solution.choices, strict=True)
    }
    mapped = {"operator": folding.operators}
    choices = []
    for variable in whole.variables:
        row = rows[variable.what, mapped.get(variable.what, folding.tensors)[variable.name]]
        choices.append(int(np.flatnonzero(variable.rows == row)[0]))
    assert whole.graph.cost(choices) == pytest.approx(solution.cost, rel=1e-3)
    assert whole.graph.memory_of(choices) == pytest.approx(solution.memory, rel=1e-6)


def test_a_graph_without_folded_layers_keeps_its_variables() -> None:
    """So that its written out solution can be varied on its own tables, as layers are that pins
    keep apart.
    """
    model = FoldedModel(graph_of(3), train=True, folded=False)
    tables = tables_of(model.graph, (2, 4))
    solution = solve(tables.graph)
    written, choices = unfold(tables, solution.choices, model.folding, model.analysis(short=False))
    sizes = tuple(len(variable.rows) for variable in written.variables)
    assert sizes == written.graph.sizes and written.graph.cost(choices) == solution.cost
