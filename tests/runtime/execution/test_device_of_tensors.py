"""Every tensor of a step is made on the rank's device, not on the host.

The meta device stands for a GPU: tensors of both in one operator are an error, and the host can
read none. A process group that moves nothing stands for the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import _mesh_resources
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
from autopar.api import plan_loaded
from autopar.runtime.launch.devices import remember
from autopar.runtime.models.model_values import model_values
from autopar.runtime.module import batches
from autopar.runtime.module.clipping import norms_of
from autopar.runtime.module.parallel_module import ModuleOptions, ParallelModule
from autopar.runtime.ranks.world import World
from autopar.sharding.analysis import analyse
from tests.gpu.sections import SIZES, _loaded

DEVICE = torch.device("meta")
PIPELINE: dict[str, Any] = {"stages": 2, "micro_batches": 4}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {"mesh": (1,)}),
    "an idle rank": (2, {"mesh": (1,)}),
    "data": (2, {"scheme": "data"}),
    "zero3": (2, {"scheme": "zero3", "micro_batches": 2}),
    "megatron": (2, {"scheme": "megatron"}),
    "1f1b": (2, {**PIPELINE, "schedule": "1f1b"}),
    "zero bubble": (2, {**PIPELINE, "schedule": "zero_bubble"}),
    "three ranks": (3, {"stages": 3, "micro_batches": 4, "schedule": "1f1b"}),
}


@pytest.fixture
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of as many ranks as asked, of which this is the one asked."""
    world, rank = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    remember(DEVICE)
    # Torch 2.15 asks for it, to price what DTensor might move.
    monkeypatch.setattr(_mesh_resources, "num_devices_per_host", lambda kind: world)
    # The host reads sums of the first batches, of which there are none here.
    monkeypatch.setattr(batches, "checksum", lambda *told, **options: b"")
    monkeypatch.setattr(batches, "agree", lambda *told, **options: None)
    yield
    dist.destroy_process_group()


def _module(options: dict[str, Any]) -> tuple[ParallelModule, Sequence[Tensor]]:
    """The planned module of the report on GPUs, and a batch of it, on the device."""
    loaded = _loaded(SIZES["cpu"], "cpu")
    devices = 1 if "mesh" in options else dist.get_world_size()
    plan = plan_loaded(loaded, devices=devices, cluster="local-cpu", **options).plan
    program = plan.execution(analyse(loaded.graph, train=True))
    values = model_values(loaded, plan.schedule.types, weights=None)
    on_device = ModuleOptions(device=DEVICE)
    module = ParallelModule(program, World.of(program), values, options=on_device)
    assert loaded.inputs is not None
    return module, [value.to(DEVICE) for value in loaded.inputs]


CASES = [
    pytest.param((world, rank), options, id=f"{name}, rank {rank}")
    for name, (world, options) in PLANS.items()
    for rank in range(world)
]


@pytest.mark.parametrize(("ranks", "options"), CASES, indirect=["ranks"])
def test_a_step_stays_on_the_device(ranks: None, options: dict[str, Any]) -> None:
    module, batch = _module(options)
    optimizer = autopar.local_optimizer(torch.optim.AdamW, module, lr=1e-3)
    assert module.train_step(batch, optimizer).device == DEVICE
    for norm_type in (2.0, 1.0, float("inf")):
        module.zero_grad()
        loss = module.loss(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.device == module.clip_grad_norm_(1.0, norm_type).device == DEVICE
    optimizer.step()
    assert {p.device for p in module.parameters()} == {DEVICE}
    with torch.no_grad():
        assert module.eval()(*batch)[0].device == DEVICE


def test_a_norm_of_nothing_is_on_the_device() -> None:
    assert norms_of([], 2.0, DEVICE).device == DEVICE
