"""A planned module on real ranks beside the module on one device: its loss and its gradients."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

import autopar
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from tests.operators.own_ops import build

Found = tuple[torch.Tensor, dict[str, torch.Tensor]]


def alone() -> Found:
    """Loss and gradients on one device."""
    module, inputs = build()
    loss = module(*inputs)
    loss.backward()
    return loss.detach(), {
        name: value.grad for name, value in module.named_parameters() if value.grad is not None
    }


def _on_rank(plan: Plan) -> Found:
    module, inputs = build()
    planned = autopar.parallelize(module, plan, inputs)
    loss = planned(*inputs)
    loss.backward()
    gradients = {
        name: value.grad for name, value in planned.named_parameters() if value.grad is not None
    }
    return loss.detach(), {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in gradients.items()
    }


def require_parity(plan: Plan) -> None:
    """Every rank's loss and gradients are those of one device."""
    loss, gradients = alone()
    assert len(gradients) == 5
    for output, grads in run_ranks(_on_rank, plan.devices, plan):
        torch.testing.assert_close(output, loss, rtol=1e-12, atol=1e-12)
        assert grads.keys() == gradients.keys()
        for name, value in gradients.items():
            torch.testing.assert_close(
                grads[name],
                value,
                rtol=1e-11,
                atol=1e-13,
                msg=lambda text, name=name: f"{name}: {text}",
            )
