"""Stand-ins of ranks that hold nothing: on the device of the placement, as the parts of others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import autopar
from autopar.integrations.oneflow.placement import TensorPlacement
from autopar.integrations.oneflow.tensor import GlobalTensor, handed
from autopar.sharding.mesh import Mesh

DEVICE = torch.device("meta")
"""The device of all ranks, which is not that of a script's own tensors."""
THERE = TensorPlacement(type="cpu", numbers=(1,), mesh=Mesh.of(d0=1))
FURTHER = TensorPlacement(type="cpu", numbers=(2,), mesh=Mesh.of(d0=1))


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorPlacement, "device", DEVICE)


def _ones() -> GlobalTensor:
    sbp = autopar.sbp.broadcast
    return autopar.ones(4, 4, placement=THERE, sbp=sbp, requires_grad=True)


def _of_parts(local: Tensor) -> GlobalTensor:
    return autopar.global_tensor(local, placement=THERE, sbp=autopar.sbp.split(0))


MADE: dict[str, Callable[[Tensor], GlobalTensor]] = {
    "made whole": lambda local: _ones(),
    "of parts": _of_parts,
    "computed": lambda local: torch.tanh(_of_parts(local)) @ _ones(),
    "in another layout": lambda local: _of_parts(local).brought(_ones().kinds),
    "sent elsewhere": lambda local: handed(_ones(), FURTHER),
}


@pytest.mark.parametrize("how", MADE)
def test_a_stand_in_is_on_the_device_of_its_placement(how: str) -> None:
    """A rank's backward pass is one thread's, which meets messages in one order everywhere."""
    local = torch.ones(4, 4, requires_grad=True)
    made = MADE[how](local)
    assert made.part.shape == (0,) and made.part.device == DEVICE
    assert made.part.requires_grad


def test_gradients_go_back_to_the_device_of_the_script() -> None:
    local = torch.ones(4, 4, requires_grad=True)
    _of_parts(local).part.backward(torch.empty(0, device=DEVICE))
    assert local.grad is not None and local.grad.device == local.device
