"""MindSpore's two-product network under autopar.

`python examples/from_mindspore.py`, or `torchrun --nproc-per-node 4 ...`.

The first product cuts its rows, as data parallelism does, the second its weight's columns, as model
parallelism does. Between them every device needs all of the first one's result, so one all-gather
stands there. The network is trained on 4 ranks and on one device.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Plan

RANKS = 4
STEPS = 5


class DenseMatMulNet(nn.Module):
    """Two products, each an operator with a cut of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.matmul1 = autopar.shard(torch.matmul, ((4, 1), (1, 1)))
        self.matmul2 = autopar.shard(torch.matmul, ((1, 1), (1, 4)))
        self.w = nn.Parameter(torch.randn(16, 32) * 0.2)
        self.v = nn.Parameter(torch.randn(32, 8) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        """The scores."""
        y = self.matmul1(x, self.w)
        z: Tensor = self.matmul2(y, self.v)
        return z


def loss(scores: Tensor, x: Tensor) -> Tensor:
    """Cross entropy; the class of a row is where its first numbers are largest."""
    return F.cross_entropy(scores, x[:, :8].argmax(1))


def build() -> DenseMatMulNet:
    """The network, with the same weights everywhere."""
    torch.manual_seed(0)
    return DenseMatMulNet()


def batch(step: int) -> Tensor:
    """A whole batch."""
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(step))


def alone() -> list[float]:
    """The losses of one device."""
    net = build()
    optimizer = autopar.Momentum(net.parameters(), 0.1, 0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(net(batch(step)), batch(step))
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def planned(size: int) -> Plan:
    """The plan for so many devices.

    The cuts are those of the network, the rest splits the batch.
    """
    autopar.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=size)
    return autopar.plan(build(), (batch(0),), cluster="local-cpu", optimizer="momentum", loss=loss)


def train(plan: Plan) -> list[float]:
    """The losses of this rank; each is given its part of the batch."""
    autopar.communication.init()
    rank = autopar.communication.get_rank()
    size = autopar.communication.get_group_size()
    model = autopar.parallelize(build(), plan, loss=loss)
    optimizer = autopar.local_optimizer(autopar.Momentum, model, lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        part = batch(step).chunk(size)[rank]
        losses.append(float(model.train_step(part, optimizer)))
    return losses


def main() -> None:
    """Train on ranks and on one device, and say how far apart they are."""
    if "RANK" in os.environ:
        losses = train(planned(int(os.environ["WORLD_SIZE"])))
    else:
        from autopar.runtime.launch import run_ranks

        losses = run_ranks(train, RANKS, planned(RANKS))[0]
    wanted = alone()
    for step, (one, other) in enumerate(zip(losses, wanted, strict=True)):
        print(f"step {step}: loss {one:.6f} on ranks, {other:.6f} on one device")
    print(f"largest difference {max(abs(a - b) for a, b in zip(losses, wanted, strict=True)):.1e}")


if __name__ == "__main__":
    main()
