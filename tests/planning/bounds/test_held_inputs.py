"""Bytes that segments surely hold, against programs of drawn solutions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.costmodel.step import mesh_prices
from autopar.ir import Graph, Operator, Ref
from autopar.planning.bounds.held_inputs import with_held_inputs
from autopar.planning.bounds.last_backward import at_once
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.space.candidates import Candidate, meshes
from autopar.planning.space.modes import Mode
from autopar.sharding.schedule import Types

from .test_within import SMALL, programs

CLUSTER = load_cluster("dgx-h100").sized(4)
CAST = Types(master="float32", reduce="float32")


def with_float_norms(graph: Graph) -> Graph:
    """The graph with norms of a wider type, so that nothing saves what they read."""
    tensors = dict(graph.tensors)
    operators = []
    for op in graph.operators:
        if not op.name.rpartition(".")[2].startswith("norm"):
            operators.append(op)
            continue
        before = op.inputs[0]
        after = op.outputs[0]
        wide = f"{before}:{op.name}:wide"
        made = f"{after}:wide"
        for name, of in ((wide, before), (made, after)):
            tensors[name] = replace(tensors[of], name=name, dtype="float32")
        norm = replace(op, inputs=(wide, *op.inputs[1:]), outputs=(made,))
        operators += [
            cast(f"{op.name}.to", before, wide),
            norm,
            cast(f"{op.name}.back", made, after),
        ]
    return replace(graph, tensors=tensors, operators=tuple(operators))


def cast(name: str, before: str, after: str) -> Operator:
    attributes = {"self": Ref(index=0)}
    return Operator(
        name=name, kind="aten.to.dtype", inputs=(before,), outputs=(after,), attributes=attributes
    )


@pytest.mark.parametrize(
    ("shape", "unit", "gated"), [((4,), 2**18, False), ((2, 2), 2**18, True), ((2, 2), 2**19, True)]
)
def test_programs_hold_what_segments_surely_hold(
    shape: tuple[int, ...], unit: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_prices, "unit_bytes", lambda prices, parameters: unit)
    graph = transformer(Shape(**SMALL, gated=gated, tied=False), batch=16).graph
    folded = FoldedModel(with_float_norms(graph), train=True, folded=False)
    mesh = next(mesh for mesh in meshes(CLUSTER) if mesh.shape == shape)
    candidate = Candidate(cluster=CLUSTER, stages=1, mesh=mesh, micro_batches=2)
    solver = CandidateSolver(folded, Request(cluster=CLUSTER, types=CAST))
    for zero in (1, 2, 3):
        mode = Mode(zero=zero, recompute="none")
        ratios = [
            counted / program.memory
            for program, counted in programs(solver, folded, candidate, mode, zero)
        ]
        assert ratios and max(ratios) <= 1 + 1e-9
        assert max(ratios) > 0.9
        work = solver.work(candidate, mode, folded.counts, short=True)
        before = at_once(solver.plain_tables(candidate, work), (), 2)
        after = with_held_inputs(before, work)
        more = [
            float(np.max(b.memory - a.memory))
            for a, b in zip(before.offered, after.offered, strict=True)
        ]
        # Of each layer products are large enough, and the head's weight is gathered once more.
        assert sum(taken > 0 for taken in more) >= 4 + (zero == 3)
