"""Exchanges under which computation goes on, against the collectives that a program issues."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.step.mesh_prices import communication_seconds
from autopar.order.scheduled import set_off
from autopar.planning.bounds.exchange_seconds import under_way
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.space.candidates import Candidate, meshes
from autopar.planning.space.modes import Mode
from autopar.sharding.program import Compute, Decision, operator_collectives
from autopar.sharding.rules.experts import EXPERTS
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

from .test_within import SMALL


@pytest.mark.parametrize("shape", [(16,), (2, 8)])
def test_they_are_the_first_and_the_last_of_each_pass(shape: tuple[int, ...]) -> None:
    graph = transformer(Shape(**SMALL, experts=16, top_k=2, expert_ffn=512), batch=16).graph
    folded = FoldedModel(graph, train=True)
    cluster = load_cluster("dgx-h100").sized(16)
    mesh = next(mesh for mesh in meshes(cluster) if mesh.shape == shape)
    candidate = Candidate(cluster=cluster, stages=1, mesh=mesh, micro_batches=1)
    solver = CandidateSolver(folded, Request(cluster=cluster))
    tables = solver.tables(solver.case(candidate, Mode(zero=1, recompute="none")))
    analysis = tables.analysis
    op = next(op for op in analysis.graph.operators if op.kind == EXPERTS)
    strategies = tables.strategies[op.name]
    call = analysis.offers[op.name].call
    gradients = analysis.as_offered(op, analysis.gradients)
    seconds = under_way(call, strategies, tables.prices, gradients)
    inside = communication_seconds(call, strategies, tables.prices, gradients)
    travels = strategies.travel_degree(shape) > 1
    total = sum(seconds.values())
    assert set(seconds) == ({"nic"} if shape == (16,) else {"nvlink", "nic"})
    assert not np.any(total[~travels]) and np.all(total[travels] > 0)
    further = 0
    for row in np.flatnonzero(travels):
        options = tuple(strategies.options[option] for option in strategies.choices[row])
        inputs, outputs = strategies.layouts(int(row))
        decision = Decision(options=options, rule=strategies.rule, inputs=inputs, outputs=outputs)
        step = Compute(operator=op, decision=decision)
        issued = operator_collectives(analysis.graph, step, shape, analysis.gradients)
        ahead, back = ([c for c in issued if c.phase == p] for p in ("forward", "backward"))
        expected = [ahead[set_off(ahead) - 1], ahead[-1], back[0], back[-1]]
        links = {tables.prices.link(c.axes) for c in expected}
        assert links == {link for link, some in seconds.items() if some[row]}
        assert total[row] == pytest.approx(sum(map(tables.prices.collective, expected)), rel=1e-6)
        assert total[row] <= inside[row] * (1 + 1e-9)
        further += total[row] < 0.9 * inside[row]
    # On two axes computation waits for the exchanges of the inner one.
    assert further or len(shape) == 1
