"""A plan inside a loop of Hugging Face Accelerate.

`torchrun --nproc-per-node 2 examples/accelerate_loop.py`.

On GPUs `accelerate launch --multi_gpu` starts the ranks, too; on CPUs it starts one process.
Accelerate makes the group, counts ranks and prints for one of them. It is not given the model to
prepare: `parallelize` has split it, and each rank reads the whole batch, of which its plan takes
what it needs. Without Accelerate the loop is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar

BATCH = 16
EPOCHS = 2


class Net(nn.Module):
    """A small classifier with its loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self.down(torch.relu(self.up(x))), y)


def dataset() -> TensorDataset:
    """Points, and which of four numbers is largest in each."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :4].argmax(1))


class _Alone:
    """The part of an `Accelerator` that the loop uses, where there is none."""

    def __init__(self) -> None:
        from autopar.runtime.launch import init_from_environment

        if not torch.distributed.is_initialized():
            init_from_environment("gloo")
        self.num_processes = torch.distributed.get_world_size()
        self.is_main_process = torch.distributed.get_rank() == 0

    def backward(self, loss: Tensor) -> None:
        """The gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def print(self, text: str) -> None:
        """Once for all ranks."""
        if self.is_main_process:
            print(text)


def accelerator() -> Any:
    """Accelerate's own, or what stands for it."""
    try:
        from accelerate import Accelerator
    except ImportError:
        return _Alone()
    return Accelerator(cpu=not torch.cuda.is_available())


def train() -> list[float]:
    """The losses."""
    own = accelerator()
    data = dataset()
    torch.manual_seed(0)
    net = Net()
    plan = autopar.plan(
        net, data[:BATCH], devices=own.num_processes, cluster="local-cpu", scheme="zero1"
    )
    model = autopar.parallelize(net, plan, data[:BATCH])
    optimizer = autopar.local_optimizer(torch.optim.AdamW, model, lr=1e-2)
    loader = DataLoader(data, batch_sampler=autopar.sampler(data, plan, seed=0))
    losses = []
    for epoch in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss = model.loss(*batch)
            own.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
        own.print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    train()
