"""The host reads no number of a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.errors import PlanError
from autopar.runtime.parameters.dtensor_numbers import refuse_numbers_of_parts


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this is one; nothing moves between them."""
    refuse_numbers_of_parts()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


READERS: list[Callable[[DTensor], object]] = [DTensor.item, float, bool]


@pytest.mark.parametrize("read", READERS)
def test_numbers_of_parts_are_refused(mesh: DeviceMesh, read: Callable[[DTensor], object]) -> None:
    split = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
    for part in (split.norm(), split.sum(), DTensor.from_local(torch.ones(()), mesh, [Partial()])):
        with pytest.raises(PlanError, match=r"this number is a part.*full_tensor"):
            read(part)


@pytest.mark.parametrize("read", READERS)
def test_whole_numbers_are_read(mesh: DeviceMesh, read: Callable[[DTensor], object]) -> None:
    whole = DTensor.from_local(torch.full((), 2.5), mesh, [Replicate()])
    assert read(whole) in (2.5, True)
