"""Parameters stored split on one axis and whole on another: their gradients come home of every
micro-batch before they are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from autopar.frontends.load import LoadedModel
from autopar.order.execution import Execution, execution
from autopar.runtime.launch import run_ranks
from autopar.runtime.models.model_values import model_values
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.analysis import analyse
from autopar.sharding.mesh import Mesh
from autopar.sharding.schedule import PLAIN, Schedule
from tests.planning.accounting import DATA, FeedForward, model_of, program_of

ROWS = 16
SEQUENCE = 4
HIDDEN = 16


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return model_of([FeedForward(norm=False, bias=False) for _ in range(2)], ROWS, SEQUENCE, HIDDEN)


def _gradients(
    model: LoadedModel, mesh: Mesh, schedule: Schedule, storage: tuple[int, ...]
) -> Mapping[str, Tensor]:
    """The gradients of rank 0, whole."""
    built = program_of(
        model.graph, mesh, lambda op: [DATA.of(op)] * len(mesh.axes), storage=storage
    )
    run = execution(built.assignment, analyse(model.graph, train=True), schedule)
    grads: Mapping[str, Tensor] = run_ranks(_on_rank, mesh.devices, model, run, timeout=120.0)[0]
    return grads


def _on_rank(model: LoadedModel, run: Execution) -> dict[str, Tensor]:
    module = ParallelModule(
        run, DeviceGroups.create(run.whole.program.assignment.mesh), model_values(model)
    )
    assert model.inputs is not None and module.loss_index is not None
    module(*model.inputs)[module.loss_index].backward()
    return {
        name: module.full_value(name, p.grad)
        for name, p in module.graph_parameters().items()
        if p.grad is not None
    }


@pytest.mark.parametrize("gathered", ["per_step", "per_pass"])
def test_gradients_of_all_micro_batches_are_summed(model: LoadedModel, gathered: Any) -> None:
    alone = _gradients(model, Mesh.of(x=1), PLAIN, ())
    for unit_bytes in (1, 2**20):
        schedule = Schedule(
            micro_batches=4, gathered=gathered, accumulated="shards", unit_bytes=unit_bytes
        )
        gradients = _gradients(model, Mesh.of(node=2, gpu=2), schedule, (1,))
        assert gradients.keys() == alone.keys()
        for name, gradient in alone.items():
            assert float((gradients[name] - gradient).abs().max() / gradient.abs().max()) < 1e-5, (
                name
            )
