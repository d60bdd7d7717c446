"""OneFlow's product of 4x5 by 5x8 under autopar, in data, model and pipeline form.

`python examples/from_oneflow.py`, or by torchrun.

The program is that of OneFlow's documents, with `autopar` in place of `oneflow`; each result is
compared with one device.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

import autopar

RANKS = 2


def data_parallel() -> float:
    """The rows of x over the devices, w on each of them."""
    placement = autopar.placement(type="cpu", ranks=[0, 1])
    x = autopar.randn(4, 5, placement=placement, sbp=autopar.sbp.split(dim=0))
    w = autopar.randn(5, 8, placement=placement, sbp=autopar.sbp.broadcast)
    out = autopar.matmul(x, w)
    assert tuple(out.shape) == (4, 8) and out.sbp == (autopar.sbp.split(dim=0),)
    return float((out.full() - x.full() @ w.full()).abs().max())


def model_parallel() -> float:
    """x on each device, the columns of w over them."""
    placement = autopar.placement(type="cpu", ranks=[0, 1])
    x = autopar.randn(4, 5, placement=placement, sbp=autopar.sbp.broadcast)
    w = autopar.randn(5, 8, placement=placement, sbp=autopar.sbp.split(dim=1))
    out = autopar.matmul(x, w)
    assert tuple(out.shape) == (4, 8) and out.sbp == (autopar.sbp.split(dim=1),)
    return float((out.full() - x.full() @ w.full()).abs().max())


def pipeline() -> float:
    """Two stages, each on a device of its own; gradients come back by the same way."""
    first = autopar.placement(type="cpu", ranks=[0])
    second = autopar.placement(type="cpu", ranks=[1])
    broadcast = autopar.sbp.broadcast
    w0 = autopar.randn(5, 8, placement=first, sbp=broadcast, requires_grad=True)
    w1 = autopar.randn(8, 3, placement=second, sbp=broadcast, requires_grad=True)
    x = autopar.randn(4, 5)
    in_stage0 = x.to_global(placement=first, sbp=broadcast)
    out_stage0 = autopar.matmul(in_stage0, w0)
    in_stage1 = out_stage0.to_global(placement=second, sbp=broadcast)
    out_stage1 = autopar.matmul(in_stage1, w1)
    assert tuple(out_stage0.shape) == (4, 8) and tuple(out_stage1.shape) == (4, 3)
    out_stage1.sum().backward()
    given = in_stage0.full()
    a = w0.full().requires_grad_()
    b = w1.full().requires_grad_()
    (given @ a @ b).sum().backward()
    assert a.grad is not None and b.grad is not None
    return max(
        float((w0.grad.full() - a.grad).abs().max()), float((w1.grad.full() - b.grad).abs().max())
    )


FORMS: dict[str, Callable[[], float]] = {
    "data": data_parallel,
    "model": model_parallel,
    "pipeline": pipeline,
}


def run() -> dict[str, float]:
    """The largest difference from one device, of each form."""
    autopar.communication.init()
    torch.manual_seed(0)
    return {name: form() for name, form in FORMS.items()}


def main() -> None:
    """Run on ranks, and say how far each form is from one device."""
    if "RANK" in os.environ:
        losses = run()
    else:
        from autopar.runtime.launch import run_ranks

        losses = run_ranks(run, RANKS)[0]
    for name, error in losses.items():
        print(f"{name}: largest difference {error:.1e}")


if __name__ == "__main__":
    main()
