"""Tables whose parts numbers of micro-batches share, beside tables that share nothing."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.planning.bounds import Bounds
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.space import Multiplicities
from autopar.planning.tables import Tables
from autopar.sharding.mesh import Axis, Mesh
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SHAPE = Shape(
    layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=1024, sequence=128, dropout=False
)
REQUEST = Request(cluster=load_cluster("dgx-h100").sized(4))
MESH = Mesh(axes=tuple(Axis(name=name, size=2, level="nvlink") for name in "ab"))


def tables_of(bounds: Bounds, micro_batches: int, waits: float) -> Tables:
    analysis = bounds.folded.analysis(short=True, micro_batches=micro_batches)
    work = Multiplicities(counts=bounds.folded.counts, passes=micro_batches, waits=waits)
    return bounds.tables(analysis, 4, 1, MESH, work)


@pytest.mark.parametrize("waits", [0.0, 1e-6])
def test_numbers_of_micro_batches_share_equal_parts_alone(waits: float) -> None:
    """A value of twice the bytes in twice as many micro-batches has the same redistributions."""
    folded = FoldedModel(transformer(SHAPE, batch=16).graph, train=True)
    sharing = Bounds(folded, REQUEST)
    for micro_batches in (1, 4, 2, 8):
        shared = tables_of(sharing, micro_batches, waits).graph
        alone = tables_of(
            Bounds(FoldedModel(folded.graph, train=True), REQUEST), micro_batches, waits
        ).graph
        assert shared.edges.keys() == alone.edges.keys()
        for ours, theirs in zip(
            (*shared.unary, *shared.edges.values()),
            (*alone.unary, *alone.edges.values()),
            strict=True,
        ):
            assert np.array_equal(ours, theirs)
