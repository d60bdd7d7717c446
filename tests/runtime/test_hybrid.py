"""Parameters stored split on one axis and whole on another: their gradients come home of every micro-batch before they are summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from autopar.frontends.load import LoadedModel
from autopar.order.execution import Execution, execution
from autopar.runtime.collectives import DeviceGroups
from autopar.runtime.launch import run_ranks
from autopar.runtime.module import ParallelModule
from autopar.runtime.parallelize import model_values
from autopar.sharding.analysis import analyse
from autopar.sharding.mesh import Mesh
from autopar.sharding.schedule import PLAIN, Schedule

from ..planning.accounting import DATA, FeedForward, model_of, program_of

ROWS, SEQUENCE, HIDDEN = 16, 4, 16


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return model_of([FeedForward(norm=False, bias=False) for _ in range(2)], ROWS, SEQUENCE, HIDDEN)


def _gradients(model: LoadedModel, mesh: Mesh, schedule: Schedule, storage: tuple[int, ...]) -> Mapping[str, Tensor]:
    """Those of rank 0, whole."""
    found = program_of(model.graph, mesh, lambda op: [DATA.of(op)] * len(mesh.axes), storage=storage)
    run = execution(found.assignment, analyse(model.graph, train=True), schedule)
    grads: Mapping[str, Tensor] = run_ranks(_on_rank, mesh.devices, model, run, timeout=120.0)[0]
    return grads


def _on_rank(model: LoadedModel, run: Execution) -> dict[str, Tensor]:
    module = ParallelModule(run, DeviceGroups.create(run.whole.program.assignment.mesh), model_values(model))
    assert model.inputs is not None and module.loss_index is not None
    module(*model.inputs)[module.loss_index].backward()
    return {name: module.full_value(name, p.grad) for name, p in module.graph_parameters().items() if p.grad is not None}


@pytest.mark.parametrize("gathered", ["kept", "again"])
def test_gradients_of_all_micro_batches_are_summed(model: LoadedModel, gathered: Any) -> None:
    alone = _gradients(model, Mesh.of(x=1), PLAIN, ())
    for unit_bytes in (1, 2**20):
        schedule = Schedule(micro_batches=4, gathered=gathered, accumulated="shards", unit_bytes=unit_bytes)
        found = _gradients(model, Mesh.of(node=2, gpu=2), schedule, (1,))
        assert found.keys() == alone.keys()
        for name, gradient in alone.items():
            assert float((found[name] - gradient).abs().max() / gradient.abs().max()) < 1e-5, name
