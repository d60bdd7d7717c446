"""What is done with parameters beside communication is in the tables as in the timeline: the sum is near the program's step."""

from __future__ import annotations

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.planning.finishing import Finisher
from autopar.planning.outer import Outer
from autopar.planning.request import Request
from autopar.planning.subject import Subject
from autopar.schemes.pinning import stage_mesh
from autopar.sharding.schedule import Types

SHAPE = Shape(layers=4, hidden=2048, heads=16, kv_heads=16, ffn=8192, vocab=8192, sequence=1024, dropout=False)
CLUSTER = load_cluster("dgx-h100").sized(8)


@pytest.mark.parametrize("types", [Types(), Types(master="float32", reduce="float32")], ids=["plain", "master"])
@pytest.mark.parametrize(("zero", "micro_batches"), [(1, 1), (3, 1), (2, 2)])
def test_the_tables_add_up_to_the_program(zero: int, micro_batches: int, types: Types) -> None:
    more = {"stages": 1, "micro_batches": micro_batches, "zero": zero, "mesh": stage_mesh(CLUSTER, (8,)), "types": types}
    outer = Outer(Subject(transformer(SHAPE, batch=32).graph, train=True), Request(cluster=CLUSTER, fewer=False, **more))  # type: ignore[arg-type]
    solved = outer.run().solved[0]
    assert Finisher(outer).finish(solved).seconds == pytest.approx(solved.seconds, rel=0.05)
